"""Saves of torch.distributed.checkpoint in host memory, with copies on other nodes, for scripts without `pk.init`.

`storage_writer` and `storage_reader` are what a script uses. `save_group` connects the ranks that save together, and
`save_memory` is what lies in a worker's memory. `save_choice` decides which save is loaded, and from where.
"""
