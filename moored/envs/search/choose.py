"""A retriever from its name: `bm25`, `dense`, or the address of a server."""

from __future__ import annotations

from dataclasses import dataclass

from moored.envs.search.dense import Dense
from moored.envs.search.remote import SearchServer
from moored.envs.search.retriever import Bm25, Retriever
from moored.envs.search.world import make_world
from moored.errors import EnvError, require_packages


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieverChoice:
    """Which retriever, over what; checked when it is made, and cheap to keep."""

    name: str = "bm25"
    corpus: str | None = None
    world_seed: int = 0
    embedding_model: str | None = None
    timeout_s: float = 10.0
    is_made_up: bool = False
    """The questions are about the world of `world_seed`, which a server must have too."""

    def __post_init__(self) -> None:
        if not self.is_server and self.name not in ("bm25", "dense"):
            raise EnvError(
                f"search: retriever must be bm25, dense or a server's address such as "
                f"http://localhost:8000, got {self.name!r}"
            )
        if self.is_server and self.corpus is not None:
            raise EnvError("search: a server has its own corpus; leave corpus out")
        if self.name == "dense" and not self.embedding_model:
            raise EnvError("search: dense retrieval needs a model; set embedding_model")
        if self.name != "dense" and self.embedding_model:
            raise EnvError("search: an embedding_model is for retriever=dense; set that too")
        if self.timeout_s <= 0:
            raise EnvError(f"search: timeout_s must be positive, got {self.timeout_s:g}")
        packages = {"bm25": ["tantivy"], "dense": ["sentence_transformers"]}
        require_packages(f"search with {self.name}", packages.get(self.name, []))

    @property
    def is_server(self) -> bool:
        return self.name.startswith(("http://", "https://"))

    def make(self) -> Retriever:
        """The retriever, not yet open."""
        if self.is_server:
            known = make_world(self.world_seed).things[0].name if self.is_made_up else None
            return SearchServer(self.name, self.timeout_s, known_title=known)
        if self.name == "dense":
            return Dense(self.corpus, self.world_seed, self.embedding_model or "")
        return Bm25(self.corpus, self.world_seed)
