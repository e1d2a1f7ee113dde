"""Many requests in, good batches out: the pure core that decides who runs with whom, where and when."""

from shapestream.scheduling.scheduler import Scheduler
from shapestream.scheduling.scheduler_statistics import ModelStatistics, SchedulerStatistics

__all__ = ["ModelStatistics", "Scheduler", "SchedulerStatistics"]
