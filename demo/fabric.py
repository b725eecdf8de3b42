"""The network, for stories about traffic: a look before and one after make the picture of the report."""

from __future__ import annotations

from demo import kube
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.fabric.command import chosen
from pacekeeper_analysis.fabric.view import FabricView


def look() -> FabricView:
    """The Fabric in force as it is now. Raises DemoError where there is none."""
    try:
        return chosen([FabricView.from_json(body) for body in kube.get("fabrics.pacekeeper.dev")])
    except InputError as error:
        raise kube.DemoError(str(error)) from error
