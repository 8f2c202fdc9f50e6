"""For people and scripts that never open the editor: workflow files, repair, remote checks, whole installations.

Standard library and numpy only, as ``checkpoint``; what needs more (PyYAML, fsspec, torch) is imported where it is
used and missed in one sentence. Nothing here is imported by the nodes.
"""
