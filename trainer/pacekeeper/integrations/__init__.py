"""Callbacks for third-party trainers, for what `pacekeeper.auto` cannot observe.

Each framework is imported only by its own module, so a script that imports `pacekeeper.integrations.huggingface` must
have transformers installed.
"""
