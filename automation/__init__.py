"""For people and scripts that never open the editor: workflow files, repair, remote checks, whole installations.

Standard library and numpy only, as ``checkpoint``; what needs more (PyYAML, huggingface_hub, torch) is imported where
it is used and missed in one sentence. Nothing here is imported by the nodes.

====================  ==================================================================================================
``commands``          the subcommands and options of ``quant-loader``: arguments in, exit code out
``console``           what is printed, where, and what never is
``errors``            the two ways a command ends without an answer
``documents``         workflow files and PNGs read within bounds; small text files written
``workflows``         both formats of a workflow: its nodes and the model files they name
``loader_nodes``      the table of loader nodes: which widget names a file of which folder
``model_folders``     where names are looked up: a models folder, ``extra_model_paths.yaml``
``workflow_check``    ``check --workflow``: each named file found and judged
``installation``      ``check --all``: every checkpoint below some folders
``convert``           ``convert-workflow``: stock loaders become ours
``addresses``         telling addresses from files, and showing them without secrets
``transport``         parts of one file over HTTP: ranges, retries, limits
``remote``            ``check ADDRESS``: header and markers of a checkpoint that is elsewhere
``spool``             a checkpoint that exists only in part, as the checker can read it
``repair``            ``repair``: plan, judge, write, judge again
``declare``           its ``--declare``
``source``            a broken file opened as strictly as its damage allows
``shards``            the files, names and index of a set
``draft``             what will be written: tensors, metadata, changes
``mends``             each lossless mend by itself
``writing``           files beside their names, renamed all together or not at all
``outlook``           ``plan``: which kernel would run each layer, on which device
``doctor``            ``doctor``: the text for a bug report
====================  ==================================================================================================
"""
