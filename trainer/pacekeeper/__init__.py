"""The trainer library, the launcher and the sidecar: the only code that imports torch."""
