"""What a run says about itself: metrics, sinks, progress, FLOPs, memory, plots and the report."""

from meshtune.observe.environment import environment
from meshtune.observe.flops import (
    device_peak_flops,
    mean_document_length,
    model_flops_utilization,
    training_flops_per_token,
)
from meshtune.observe.memory import peak_memory_bytes
from meshtune.observe.metrics import Recorder
from meshtune.observe.plots import loss_png
from meshtune.observe.precision import choose_precision, compute_dtype, measure_matmul_flops
from meshtune.observe.progress import Progress, make_progress
from meshtune.observe.report import write_report
from meshtune.observe.section import LoggingSection
from meshtune.observe.sinks import JSONLSink, Sink, TensorBoardSink

__all__ = [
    "JSONLSink",
    "LoggingSection",
    "Progress",
    "Recorder",
    "Sink",
    "TensorBoardSink",
    "choose_precision",
    "compute_dtype",
    "device_peak_flops",
    "environment",
    "loss_png",
    "make_progress",
    "mean_document_length",
    "measure_matmul_flops",
    "model_flops_utilization",
    "peak_memory_bytes",
    "training_flops_per_token",
    "write_report",
]
