"""Metrics and log lines."""

from paceline.observability.logs import log_stats, setup_logging
from paceline.observability.metrics import Metrics, RequestObserver

__all__ = ["Metrics", "RequestObserver", "log_stats", "setup_logging"]
