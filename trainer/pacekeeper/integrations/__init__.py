"""Trainers of other people: a callback each, for what `pacekeeper.auto` cannot see. A framework is imported by its own
module only, so a script that imports `pacekeeper.integrations.huggingface` has transformers.
"""
