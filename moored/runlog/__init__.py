"""The run directory: what a run writes, and what analysis reads."""

from moored.runlog.log import RunLog, read_records

__all__ = ["RunLog", "read_records"]
