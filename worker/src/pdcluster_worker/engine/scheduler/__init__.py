"""Schedulers: choose the tokens of each request in the next step, behind one protocol."""

from pdcluster_worker.engine.scheduler.protocol import Scheduler
from pdcluster_worker.engine.scheduler.registry import SCHEDULERS, make_scheduler
from pdcluster_worker.engine.scheduler.schedule import Schedule

__all__ = ["SCHEDULERS", "Schedule", "Scheduler", "make_scheduler"]
