"""moored: multi-turn LLM agents whose reasoning stays moored to its input."""

__version__ = "0.2.0.dev0"
