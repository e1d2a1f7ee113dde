"""The scheduler: it decides which requests share a batch, on which slot it runs, and when. Pure."""

from shapestream.scheduling.scheduler import Scheduler
from shapestream.scheduling.scheduler_statistics import ModelStatistics, SchedulerStatistics

__all__ = ["ModelStatistics", "Scheduler", "SchedulerStatistics"]
