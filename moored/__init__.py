"""moored: multi-turn LLM agents whose reasoning stays moored to its input."""

__version__ = "0.1.0"
