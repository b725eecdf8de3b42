"""Thin kopf handlers that call the services and the reconcile loop."""
