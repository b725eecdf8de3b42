"""A stand-in for NVIDIA's dcgm-exporter on nodes without GPUs.

It has the real metric names and labels, with values set by hand.

`python -m testcluster.dcgm_exporter` serves /metrics as the real one does, for eight GPUs of the node $NODE_NAME.
`PUT /gpus/<gpu>/<metric>` with a number as its body sets a value, as a fault would.
"""

from __future__ import annotations

import os
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, Gauge, generate_latest

PORT = 9400
GPUS = 8

_LABELS = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname")
_GAUGES = {
    "DCGM_FI_DEV_XID_ERRORS": "Value of the last XID error encountered.",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "Whether remapping of rows has failed.",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "Number of remapped rows for uncorrectable errors.",
    "DCGM_FI_DEV_GPU_TEMP": "GPU temperature (in C).",
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "Total number of double-bit volatile ECC errors.",
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": "Total number of single-bit volatile ECC errors.",
    "DCGM_FI_DEV_ROW_REMAP_PENDING": "Whether rows wait for a reset to be remapped.",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "Total number of PCIe retries.",
    "DCGM_FI_DEV_SM_CLOCK": "SM clock frequency (in MHz).",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "Ratio of time the graphics engine is active.",
}


class Gpus:
    """The values of a node's GPUs. All start at 0, and stay as they are set, as in the real exporter."""

    def __init__(self, node: str) -> None:
        self.registry = CollectorRegistry()
        self._metrics = {name: Gauge(name, text, _LABELS, registry=self.registry) for name, text in _GAUGES.items()}
        self._labels = [
            (
                str(gpu),
                f"GPU-{node}-{gpu}",
                f"00000000:{gpu + 1:02X}:00.0",
                f"nvidia{gpu}",
                "NVIDIA H100 80GB HBM3",
                node,
            )
            for gpu in range(GPUS)
        ]
        for metric in self._metrics.values():
            for labels in self._labels:
                metric.labels(*labels).set(0)

    def set(self, gpu: int, metric: str, value: float) -> None:
        self._metrics[metric].labels(*self._labels[gpu]).set(value)


class Handler(BaseHTTPRequestHandler):
    gpus: Gpus

    def do_GET(self) -> None:
        body = generate_latest(self.gpus.registry)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        try:
            _, gpu, metric = self.path.strip("/").split("/")
            value = float(self.rfile.read(int(self.headers["Content-Length"])))
            self.gpus.set(int(gpu), metric, value)
        except (ValueError, KeyError, IndexError) as error:
            self.send_error(HTTPStatus.BAD_REQUEST, f"PUT /gpus/<0 … {GPUS - 1}>/<metric> with a number: {error!r}")
            return
        self.send_response(HTTPStatus.NO_CONTENT)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: there are scrapes every second."""


if __name__ == "__main__":
    Handler.gpus = Gpus(os.environ["NODE_NAME"])
    ThreadingHTTPServer(("", PORT), Handler).serve_forever()
