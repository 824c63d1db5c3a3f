"""Names that options may take, what they stand for, and which numbers are valid with them.

Configuration and maths both check against these, so a name is known in one place. What can be added
to is a `Registry`: a name and where its object lives, so that checking a name imports nothing, and
`module:attribute` stands for an object outside the package. The other sets of names are closed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

from moored.errors import MooredError, UnknownNameError, close_match_hint, describe_raised


class Registry(Mapping[str, str]):
    """Lazy name -> object table for one kind of thing, e.g. environments."""

    def __init__(self, kind: str, paths: Mapping[str, str]) -> None:
        self.kind = kind
        self._paths = dict(paths)

    def __getitem__(self, name: str) -> str:
        return self._paths[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def check(self, name: str) -> str:
        """Return a registered name or a `"module:attribute"` as it is; imports nothing."""
        if name not in self._paths and ":" not in name:
            raise UnknownNameError(
                f"unknown {self.kind} {name!r}; {close_match_hint(name, self._paths)} "
                f"(or give 'module:attribute')"
            )
        return name

    def get_object(self, name: str) -> object:
        """Import and return what `name` (or `"module:attribute"`) stands for."""
        return import_object(self._paths.get(self.check(name), name), kind=self.kind)


def import_object(path: str, *, kind: str = "object") -> object:
    """Import `"package.module:attribute"` or `"folder/file.py:attribute"`.

    Errors say which half is wrong.
    """
    module_name, attribute = split_path(path, kind=kind)
    if module_name.endswith(".py"):
        module_name = _module_of_file(module_name, f"{kind} path {path!r}")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UnknownNameError(
            f"{kind} path {path!r}: {_import_problem(module_name, error)}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise UnknownNameError(
            f"{kind} path {path!r}: module {module_name!r} has no attribute {attribute!r}; "
            f"{close_match_hint(attribute, public)}"
        ) from None


def split_path(path: str, *, kind: str = "object") -> tuple[str, str]:
    """The halves of `"package.module:attribute"`; imports nothing."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise UnknownNameError(f"{kind} path {path!r} must look like 'package.module:attribute'")
    return module_name, attribute


def file_of(text: str) -> str:
    """The file of `"folder/file.py:attribute"`; any other text as it is."""
    file, is_code, _ = text.partition(".py:")
    return f"{file}.py" if is_code else text


def _module_of_file(file: str, what: str) -> str:
    """The name by which a file is imported, from now on; pickles and other modules use it too."""
    whole = Path(file).resolve()
    if not whole.is_file():
        raise UnknownNameError(f"{what}: there is no file {file!r}; check its path")
    if str(whole.parent) not in sys.path:
        sys.path.append(str(whole.parent))
    importlib.invalidate_caches()
    spec = None if "." in whole.stem else importlib.util.find_spec(whole.stem)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != whole:
        raise UnknownNameError(
            f"{what}: no module can be called {whole.stem!r}, or another is; "
            f"give the file another name"
        )
    return whole.stem


def _import_problem(module_name: str, error: BaseException) -> str:
    """What went wrong, where, and what to do: the path, the module's own code or a dependency."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{module_name}.".startswith(f"{missing}."):
        return (
            f"no module named {missing!r}; check the spelling, start the command in the folder of "
            f"{missing}.py, or install the package it is in"
        )
    advice = f"install {missing}" if missing is not None else "fix that first"
    return f"importing {module_name!r} {' '.join(describe_raised(error).split())}; {advice}"


ALGORITHMS = Registry(
    "algorithm",
    {
        "ppo": "moored.training.algorithms:PPO",
        "dapo": "moored.training.algorithms:DAPO",
        "grpo": "moored.training.algorithms:GRPO",
        "dr_grpo": "moored.training.algorithms:DR_GRPO",
        "rloo": "moored.training.algorithms:RLOO",
        "reinforce_pp": "moored.training.algorithms:REINFORCE_PP",
        "gspo": "moored.training.algorithms:GSPO",
        "cispo": "moored.training.algorithms:CISPO",
    },
)
ESTIMATORS = Registry(
    "advantage estimator",
    {
        "gae": "moored.training.algorithms:GAE",
        "bilevel_gae": "moored.training.algorithms:BILEVEL_GAE",
        "grpo": "moored.algo:grpo",
        "dr_grpo": "moored.algo:dr_grpo",
        "rloo": "moored.algo:rloo",
        "reinforce_pp": "moored.training.algorithms:REWARDS_TO_GO",
    },
)
SCORES = Registry(
    "score",
    {
        "variance": "moored.algo.groups:variance",
        "std": "moored.algo.groups:std",
        "reward_mean": "moored.algo.groups:mean",
        "length": "moored.algo.groups:LENGTH",
        "entropy": "moored.algo.groups:ENTROPY",
        "entropy_std": "moored.algo.groups:ENTROPY_STD",
    },
)
RULES = Registry(
    "rule",
    {
        "top_p": "moored.algo.filters:top_p",
        "top_p_softmax": "moored.algo.filters:top_p_softmax",
        "top_k": "moored.algo.filters:top_k",
        "top_k_count": "moored.algo.filters:top_k_count",
        "min_p": "moored.algo.filters:min_p",
        "nonzero": "moored.algo.filters:nonzero",
        "quantile": "moored.algo.filters:quantile",
        "none": "moored.algo.filters:none",
    },
)
ENGINES = Registry(
    "engine",
    {
        "local": "moored.engine.local.engine:LocalEngine",
        "torchrun": "moored.engine.workers.torchrun:make_engine",
        "ray": "moored.engine.ray.engine:RayEngine",
        "endpoint": "moored.engine.endpoint.engine:EndpointEngine",
    },
)
SAMPLERS = Registry(
    "sampler",
    {
        "auto": "moored.engine.samplers:auto",
        "fast": "moored.engine.samplers:fast",
        "plain": "moored.engine.samplers:plain",
        "vllm": "moored.engine.vllm.sampler:vllm_sampler",
    },
)

DIVIDES_BY_STD = ("grpo", "dapo", "gspo", "cispo")
"""Algorithms and advantage estimators that divide advantages by the std of the group's rewards."""

FilterReward = Literal["task", "total", "success"]
FilterAction = Literal["drop", "mask", "refill", "soft"]
LossScale = Literal["none", "linear", "sqrt"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]
Schedule = Literal["constant", "linear", "cosine"]

LOSS_SCALES: tuple[str, ...] = get_args(LossScale)
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
SCHEDULES: tuple[str, ...] = get_args(Schedule)


def sampler_for(name: str, *, is_fast: bool) -> str:
    """`auto` is `fast` for models of the shape that the fast sampler knows, else `plain`."""
    if name != "auto":
        return name
    return "fast" if is_fast else "plain"


def check_name(kind: str, name: str, known: tuple[str, ...]) -> None:
    """Raise with a close match when `name` is not known."""
    if name not in known:
        raise MooredError(f"unknown {kind} {name!r}; {close_match_hint(name, known)}")


RULE_VALUES = {
    "top_p": "a share of the total in [0, 1]",
    "top_p_softmax": "a share of the total in [0, 1]",
    "top_k": "a fraction of the groups in [0, 1] (for a count use top_k_count)",
    "top_k_count": "a whole number of groups >= 1",
    "min_p": "a fraction of the best score in [0, 1]",
    "quantile": "the quarter to keep: 1, 2, 3 or 4",
}


def check_rule_value(rule: str, value: float) -> None:
    """Raise when `value` makes no sense for a built-in selection rule; others check their own."""
    RULES.check(rule)
    if rule == "top_k_count":
        is_valid = value >= 1 and value % 1 == 0
    elif rule == "quantile":
        is_valid = value in (1, 2, 3, 4)
    else:
        is_valid = rule not in RULE_VALUES or 0.0 <= value <= 1.0
    if not is_valid:
        raise MooredError(f"rule {rule} takes {RULE_VALUES[rule]}, got value {value}")
