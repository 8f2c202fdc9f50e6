"""Every rule of the check: id, severity, wording and remedy, in one place. ``docs/rules.md`` is written from this
table.

Ids without a prefix are those of the reference rule set; ``crash.*`` are inputs on which the reference crashes;
``extra.*`` are our own, always towards safety. Messages are templates over ``layer``, ``tensor``, ``expected``,
``found`` and the rule's own words.
"""

from __future__ import annotations

from dataclasses import dataclass

from .report import Severity


@dataclass(frozen=True)
class Rule:
    """One row of the catalogue.

    ``title`` completes "3 faults in 2 of 10 layers (...)". ``repairable`` means that a lossless repair exists for the
    usual case; a fault can say otherwise. ``why`` is for the documentation: how files get that way and what would
    happen. ``of_absence``: the rule is about something that is not in the files, so it proves nothing while one of
    them is missing.
    """

    id: str
    severity: Severity
    title: str
    message: str
    fix: str
    why: str = ""
    repairable: bool = False
    of_absence: bool = False


REDOWNLOAD = "Download the file again and compare its size or checksum with the publisher's."
REEXPORT = "Export the layer again with a current version of the tool that made the file."
CUT_TRAILING = (
    " If the publisher's file is the same, `quant-loader repair` writes a copy without these bytes (lossless)."
)
REPAIR = "Run `quant-loader repair` on the file (lossless)"
MENDABLE = " Or mend the file for good: `quant-loader repair` writes what it means in the standard form (lossless)."
NOT_MENDABLE = " `quant-loader repair` does not help here: the strict rules have no form for {what}."
READ_NESTED = "Set rules to compatible, which reads the nested settings where the declaration itself is silent. Or: "
DECLARE = "If you know how the file was made, declare it: `quant-loader repair FILE --declare FORMAT`."

_ROWS: tuple[Rule, ...] = (
    # -- files -------------------------------------------------------------------------------------------------------
    Rule(
        "crash.file",
        "error",
        "damaged file",
        "{file} is not a sound safetensors file: {found}.",
        REDOWNLOAD + "{remedy}",
        "The header cannot be read, or the byte ranges do not tile the file exactly: a truncated or damaged "
        "download, bytes appended by a "
        "broken tool, or no safetensors file at all.",
    ),
    Rule(
        "extra.file.not_found",
        "error",
        "no such file",
        "{file} was not found.",
        "Check the name and the folder; refresh the list of models.",
    ),
    Rule(
        "extra.file.special",
        "error",
        "not a file",
        "{file} cannot be checked: {found}.",
        "Give the path of a .safetensors file, or of the index of a sharded model.",
    ),
    Rule(
        "extra.file.unreadable",
        "error",
        "unreadable file",
        "{file} cannot be opened: {found}.",
        "Check the permissions and the disk, then try again.",
    ),
    Rule(
        "extra.file.not_checkpoint",
        "error",
        "not a checkpoint",
        "{file} is no checkpoint file: {found}.",
        "Give a .safetensors file, or the .safetensors.index.json of a sharded model.",
    ),
    Rule(
        "extra.file.header_size",
        "error",
        "oversized header",
        "{file} has {found}; expected {expected}.",
        "No published checkpoint needs this: the file is damaged or made to exhaust memory. " + REDOWNLOAD,
        "A header of tens of megabytes only occurs in damaged or hostile files; parsing it would cost hundreds of "
        "megabytes.",
    ),
    Rule(
        "extra.file.duplicate_key",
        "error",
        "a tensor listed twice",
        "{file} lists the tensor {tensor} twice in its header.",
        "Two programs may read two different tensors from it. Save the file again with the tool that made it.",
        "JSON keeps the last of two equal keys without a word, other readers the first.",
    ),
    Rule(
        "extra.file.changed",
        "error",
        "file changed while it was read",
        "{file} changed while it was being checked: {found}.",
        "Wait until the download or copy has finished, then check again.",
    ),
    Rule(
        "extra.file.too_many_faults",
        "notice",
        "further faults not listed",
        "{found} further faults of this file are counted but not listed.",
        "Mend the listed ones first; faults of one kind usually share one cause.",
    ),
    # -- shards ------------------------------------------------------------------------------------------------------
    Rule(
        "extra.shards.index",
        "error",
        "bad shard index",
        "The shard index {file} cannot be used: {found}.",
        "Download the index file again; it must come from the same release as the shards.",
    ),
    Rule(
        "extra.shards.missing",
        "error",
        "missing shards",
        "The model is split into several files, and not all are there. Missing: {found}.",
        "Download what is missing into the same folder.",
        "Tensors and declarations that the files there lack may lie in the missing ones: nothing is said about them "
        "until all files are there.",
    ),
    Rule(
        "extra.shards.duplicate_file",
        "error",
        "a shard given twice",
        "{found} is given twice.",
        "Name every file of the model once.",
    ),
    Rule(
        "extra.shards.duplicate_tensor",
        "error",
        "a tensor in two shards",
        "Tensor {tensor} is in two files: {found}.",
        "Shards of two releases were probably mixed. Delete them and download one complete set.",
        "Which of the two a loader uses depends on the order of the files.",
    ),
    Rule(
        "extra.shards.repeated_marker",
        "warning",
        "a marker repeated in another shard",
        "The marker {tensor} is in two files with the same content: {found}.",
        "Harmless; the tool that split the model copied it.",
    ),
    Rule(
        "extra.shards.index_tensor",
        "error",
        "index and shards disagree",
        "The shard index places tensor {tensor} in {expected}, but it is {found}.",
        "The index and the shards come from different releases. Download one complete set.",
    ),
    # -- foreign formats ---------------------------------------------------------------------------------------------
    Rule(
        "extra.foreign.pickle",
        "error",
        "a pickle file",
        "{file} is a pickle checkpoint (.ckpt / .pt), which can run any program when it is opened. It was not opened.",
        "Get the model as a .safetensors file.",
        "Loading a pickle executes code from the file.",
    ),
    Rule(
        "extra.foreign.gguf",
        "error",
        "a GGUF file",
        "{file} is a GGUF file, not a safetensors checkpoint.",
        "Load it with a GGUF loader node, or get a safetensors version of the model.",
    ),
    Rule(
        "extra.foreign.svdquant",
        "error",
        "SVDQuant (Nunchaku) format",
        "This is an SVDQuant (Nunchaku) model: {found}.",
        "Load it with the Nunchaku nodes, or get a Comfy-quantised version (int8, nvfp4, fp8).",
    ),
    Rule(
        "extra.foreign.modelopt",
        "error",
        "a ModelOpt export",
        "This is an NVIDIA ModelOpt / diffusers export without Comfy declarations: {found}.",
        "Get the version of the model that is published for ComfyUI, or convert it with a tool that writes "
        "comfy_quant markers. " + DECLARE,
        "The tensors look like NVFP4 or FP8, but the order of nibbles and block scales is the exporter's, and "
        "nothing in the file tells it.",
    ),
    Rule(
        "extra.foreign.bitsandbytes",
        "error",
        "a bitsandbytes model",
        "This is a bitsandbytes model (NF4 / FP4 / LLM.int8): {found}.",
        "Load it with a bitsandbytes loader, or get a Comfy-quantised version.",
    ),
    Rule(
        "extra.foreign.gptq",
        "error",
        "GPTQ / AWQ format",
        "This is a GPTQ or AWQ model: {found}.",
        "ComfyUI has no kernel for it here; get a Comfy-quantised version.",
    ),
    Rule(
        "extra.foreign.compressed",
        "error",
        "another tool's packed format",
        "This model is packed by another tool ({found}).",
        "Get a version with comfy_quant markers, or load it with that tool's own nodes.",
        "FastVideo, LightX2V and compressed-tensors pack NVFP4 with other names, nibble orders or scale layouts.",
    ),
    Rule(
        "extra.foreign.declared",
        "error",
        "another tool's quantisation",
        "The file's own configuration says that it was quantised by {found}, and no Comfy declaration covers its "
        "weights.",
        "Get a Comfy-quantised version of the model. " + DECLARE,
    ),
    # -- declarations: header metadata -------------------------------------------------------------------------------
    Rule(
        "meta.json",
        "error",
        "unreadable quantisation metadata",
        "The file's _quantization_metadata is not JSON: {found}.",
        REDOWNLOAD + " If it still fails, the file was written by a broken tool: export it again.",
        "Without it the layers that it declares cannot be told from garbage.",
    ),
    Rule(
        "meta.not_object",
        "error",
        "malformed quantisation metadata",
        "The file's _quantization_metadata must be a JSON object, got {found}.",
        REEXPORT,
    ),
    Rule(
        "meta.layers_not_object",
        "error",
        "malformed quantisation metadata",
        'The file\'s _quantization_metadata must have an object under "layers", got {found}.',
        REEXPORT,
    ),
    Rule(
        "meta.entry_not_object",
        "error",
        "malformed metadata entry",
        'The metadata entry of layer {layer} must be an object such as {{"format": "nvfp4"}}, got {found}.',
        REEXPORT,
    ),
    Rule(
        "crash.meta.recursion",
        "error",
        "metadata nested too deeply",
        "The file's _quantization_metadata is nested too deeply to be read.",
        "No tool writes this: the file is damaged or hostile. " + REDOWNLOAD,
    ),
    Rule(
        "crash.meta.bigint",
        "error",
        "absurd number in the metadata",
        "The file's _quantization_metadata holds a number with thousands of digits.",
        "No tool writes this: the file is damaged or hostile. " + REDOWNLOAD,
    ),
    Rule(
        "extra.meta.size",
        "error",
        "oversized metadata",
        "The file's _quantization_metadata has far too many entries ({found}).",
        "No tool writes this: the file is damaged or hostile. " + REDOWNLOAD,
    ),
    Rule(
        "extra.meta.duplicate_key",
        "error",
        "a metadata key twice",
        "The file's _quantization_metadata has the key {found} twice in one object.",
        "Two programs may read two different values. " + REEXPORT,
    ),
    # -- declarations: markers ---------------------------------------------------------------------------------------
    Rule(
        "marker.json",
        "error",
        "markers unreadable",
        "The comfy_quant marker of layer {layer} is {found}; expected {expected}.",
        "{remedy}",
        "Markers of NUL bytes come from damaged downloads; the weights around them are usually damaged as well.",
    ),
    Rule(
        "marker.not_object",
        "error",
        "malformed markers",
        'The comfy_quant marker of layer {layer} must be a JSON object such as {{"format": "nvfp4"}}, got {found}.',
        REEXPORT,
    ),
    Rule(
        "crash.marker.tensor_dtype",
        "error",
        "markers stored with an impossible type",
        "The comfy_quant marker of layer {layer} is stored as {found}; expected U8 bytes.",
        "A conversion cast every tensor, markers included. " + REEXPORT,
        "A cast of the marker's bytes to a float type may have changed them.",
    ),
    Rule(
        "crash.marker.recursion",
        "error",
        "marker nested too deeply",
        "The comfy_quant marker of layer {layer} is nested too deeply to be read.",
        "No tool writes this: the file is damaged or hostile. " + REDOWNLOAD,
    ),
    Rule(
        "crash.marker.bigint",
        "error",
        "absurd number in a marker",
        "The comfy_quant marker of layer {layer} holds a number with thousands of digits.",
        "No tool writes this: the file is damaged or hostile. " + REDOWNLOAD,
    ),
    Rule(
        "marker.conflict",
        "error",
        "contradicting declarations",
        "Layer {layer} is declared twice with different settings: {expected} in {first}, {found} in {second}.",
        "Only one of them is right, and the file does not say which. Export it again, or remove the wrong one with "
        "`quant-loader repair`.",
    ),
    Rule(
        "marker.missing",
        "error",
        "layers without a declaration",
        "Layer {layer} has a {found} weight but nothing in the file says how it is quantised{look}.",
        "Get a version of the file with comfy_quant markers. " + DECLARE,
        "The stock loader casts such weights to numbers and makes pictures of noise.",
        of_absence=True,
    ),
    Rule(
        "extra.marker.duplicate_key",
        "error",
        "a marker key twice",
        "The comfy_quant marker of layer {layer} has the key {found} twice.",
        "Two programs may read two different values. " + REEXPORT,
    ),
    Rule(
        "extra.marker.size",
        "error",
        "oversized markers",
        "The comfy_quant marker of layer {layer} is {found}; expected {expected}.",
        "No tool writes this: the file is damaged or hostile. " + REDOWNLOAD,
    ),
    Rule(
        "extra.format.unknown",
        "error",
        "unknown format",
        "Layer {layer} declares the format {found}, which this version does not know; it knows {expected}.",
        "Update Quant Loader; if that does not help, get the model in one of the known formats.",
    ),
    Rule(
        "extra.format.absent",
        "error",
        "declarations without a format",
        "The declaration of layer {layer} names no format (it says {found}); expected one of {expected}.",
        "{remedy}",
        "A retired loader wrote markers of this kind; its files hold INT8 weights rotated in groups of 256.",
    ),
    Rule(
        "extra.params.contradict",
        "error",
        "contradicting nested settings",
        "Layer {layer}: the nested `params` say {found}, while the declaration itself reads as {expected}.",
        "{remedy}Export the layer again with one of the two left out.",
        "ComfyUI falls back to nested `params`, other runtimes do not: the same file gives two different pictures.",
    ),
    Rule(
        "extra.value.type",
        "error",
        "settings of the wrong kind",
        "Layer {layer}: {setting} must be {expected}, got {found}.",
        "Try rules = compatible if the meaning is plain; otherwise export the layer again.",
    ),
    Rule(
        "extra.flag.type",
        "warning",
        "a flag that is no true / false",
        "Layer {layer}: {setting} should be true or false, got {found}; read as {expected}.",
        "Harmless: the flag chooses how exactly the product is computed, not what the weight is.",
    ),
    Rule(
        "extra.convrot.unsupported",
        "error",
        "rotation declared for a format that has none",
        "Layer {layer}: the declaration says convrot {found}, but {expected}.",
        "Check which format the layer really has; correct the marker or export the layer again.",
    ),
    Rule(
        "layer.missing_tensors",
        "error",
        "missing tensors",
        "Layer {layer} ({format}) lacks {found}; it needs {expected}.",
        "{remedy}",
        "The declaration names a layer whose tensors are not in the file: another prefix, a dropped shard, or scales "
        "removed by a conversion.",
        of_absence=True,
    ),
    Rule(
        "extra.layer.missing_tensors",
        "error",
        "missing tensors",
        "Layer {layer} ({format}) lacks {found}; it needs {expected}.",
        "{remedy}",
        "As layer.missing_tensors, for formats that the reference does not check.",
        of_absence=True,
    ),
    Rule(
        "extra.layer.count",
        "error",
        "more layers than any model has",
        "{found} layers are declared in {file}; expected {expected}.",
        "No published model comes near this: the file is damaged or made to keep a program busy. " + REDOWNLOAD,
        "Every declaration is judged and reported, which has to end in reasonable time.",
    ),
    Rule(
        "extra.scale.orphan",
        "error",
        "scales that nothing uses",
        "Layer {layer} has {found}, which no declaration uses ({expected}).",
        "A scale that is not applied means a wrong picture. Get a version of the file with declarations that match "
        "its tensors, or export it again.",
        "A weight whose scale is ignored is wrong by that factor; nothing else would notice.",
        of_absence=True,
    ),
    Rule(
        "extra.scale.unused",
        "warning",
        "activation scales that nothing uses",
        "Layer {layer} has {found}, which is not needed ({expected}).",
        "Harmless: activations are scaled as they come.",
        of_absence=True,
    ),
    Rule(
        "map.collision",
        "error",
        "two layers with one name",
        "Two quantised layers of the file become the layer {layer} of the model: {found}.",
        "The file holds the model twice under different prefixes. Keep one copy.",
    ),
    Rule(
        "extra.shape.empty",
        "error",
        "empty weights",
        "Layer {layer} has an empty weight {found}; expected at least one row and one column.",
        REEXPORT,
    ),
    Rule(
        "extra.bias.shape",
        "error",
        "biases that do not fit their weights",
        "Layer {layer}: its bias is {found}; a weight of {weight} needs a bias of {expected}{look}.",
        "The weight and the bias are not of one layer: the weight was transposed, cut or padded by a conversion, or "
        "parts of two models were mixed. " + REEXPORT,
        "A weight whose scales do not depend on its shape (FP8, INT8 with one scale) is sound by itself when it is "
        "stored transposed or cut short; its bias tells.",
    ),
    Rule(
        "extra.bias.dtype",
        "error",
        "biases that are no floats",
        "Layer {layer}: its bias is stored as {found}; expected {expected}.",
        "A bias is never quantised to integers in these formats, and no scale says what these would mean. " + REEXPORT,
    ),
    # -- values ------------------------------------------------------------------------------------------------------
    Rule(
        "extra.scale.nonfinite",
        "error",
        "NaN or infinite scales",
        "Layer {layer}: {tensor} holds {found}; expected finite numbers.",
        "The layer would turn the whole picture black. "
        + REDOWNLOAD
        + " If it still fails, the quantisation itself went wrong.",
    ),
    Rule(
        "extra.scale.not_positive",
        "error",
        "zero or negative scales",
        "Layer {layer}: {tensor} holds {found}; expected positive numbers.",
        REDOWNLOAD + " If it still fails, the quantisation itself went wrong.",
        "A region of zeros is the usual trace of a damaged download.",
    ),
    Rule(
        "extra.scale.implausible",
        "warning",
        "implausibly large scales",
        "Layer {layer}: {tensor} = {found} would make weights as large as {expected}; no network has such weights.",
        "The scale may be stored as its reciprocal, or belong to another format. If pictures are noise, this is the "
        "reason.",
    ),
    Rule(
        "extra.scale.count",
        "error",
        "more scales than any network has",
        "The file holds {found} of row scales; expected at most {expected}.",
        "No network has that many rows: the file is damaged or hostile.",
    ),
    # -- FP8 ---------------------------------------------------------------------------------------------------------
    Rule(
        "extra.fp8.dtype",
        "error",
        "FP8 layers of another type",
        "FP8 layer {layer} needs a {expected} weight, got {found}.",
        "Drop the marker of a layer that is not quantised, or export the layer again.",
        "The reference checks nothing about FP8 layers.",
    ),
    Rule(
        "extra.fp8.rank",
        "error",
        "FP8 layers that are no linears",
        "FP8 layer {layer} needs a 2D weight, got {found}{look}.",
        "Leave convolutions, norms and expert banks out of the quantisation.",
        "The stock loader runs a quantised convolution without its scale.",
    ),
    Rule(
        "extra.fp8.scale_shape",
        "error",
        "FP8 scales of another shape",
        "FP8 layer {layer} needs one scale for the whole weight or one per row (N, 1), got {tensor} {found}.",
        "Block-wise FP8 is another tool's recipe: get a version with one scale per layer or per row. A single "
        "value in another shape is read by rules = compatible.",
    ),
    Rule(
        "extra.fp8.scale_dtype",
        "error",
        "FP8 scales of another type",
        "FP8 layer {layer} needs an F32 {tensor}, got {found}.",
        REEXPORT,
    ),
    Rule(
        "extra.fp8.scale_narrow",
        "warning",
        "FP8 scales that are not F32",
        "FP8 layer {layer} stores {tensor} as {found}; it is used as F32.",
        "Nothing needs to be done here; other runtimes refuse such scales. `quant-loader repair` stores them as F32 "
        "where that changes no value.",
        repairable=True,
    ),
    Rule(
        "extra.fp8.input_scale",
        "error",
        "malformed activation scales",
        "FP8 layer {layer} needs one F32 value as input_scale, got {found}.",
        "Remove the input_scale (activations are then scaled as they come) or export the layer again.",
    ),
    # -- MXFP8 -------------------------------------------------------------------------------------------------------
    Rule(
        "mxfp8.layout",
        "error",
        "MXFP8 layers of another layout",
        "The file declares MXFP8 for all its layers, but layer {layer} is {found}; expected {expected}.",
        "{remedy}",
    ),
    Rule(
        "extra.mxfp8.dtype",
        "error",
        "MXFP8 layers of another type",
        "MXFP8 layer {layer} needs {expected}, got {found}.",
        REEXPORT,
    ),
    Rule(
        "extra.mxfp8.rank",
        "error",
        "MXFP8 layers that are no linears",
        "MXFP8 layer {layer} needs a 2D weight, got {found}{look}.",
        "Leave convolutions, norms and expert banks out of the quantisation.",
    ),
    Rule(
        "extra.mxfp8.shapes",
        "error",
        "MXFP8 scales of another shape",
        "MXFP8 layer {layer} has incompatible weight/scale shapes: {found}; expected {expected}.",
        REEXPORT,
    ),
    Rule(
        "extra.mxfp8.scale_layout",
        "error",
        "ambiguous MXFP8 scale layout",
        "MXFP8 layer {layer} stores its block scales as {found}, which does not say in which order they are; "
        "expected {expected}.",
        "Export the layer with scales in the padded 128x4 order that ComfyUI writes. " + DECLARE,
        "Kernels read the scales in 128x4 tiles. An unpadded tensor of this size cannot be in that order, yet some "
        "runtimes read it so: blocks of the picture's weights "
        "then get other blocks' scales.",
    ),
    # -- INT8 --------------------------------------------------------------------------------------------------------
    Rule(
        "int8.scalar.rank",
        "error",
        "INT8 layers that are no linears",
        "Comfy tensorwise INT8 layer {layer} needs a 2D weight, got {found}{look}.",
        "Re-export with the kernel flattened to (out, in*kh*kw), or leave convolutions out of the quantisation; if "
        "another scheme was used, correct the marker's format.",
        "A convolution exported in kernel layout, or a marker on a module that is no linear.",
    ),
    Rule(
        "int8.dtype",
        "error",
        "INT8 layers of another type",
        "Comfy INT8 layer {layer} needs I8 weights and F32 scales, got {found}.",
        "{remedy}",
        "A layer fell back to BF16 and kept its marker; scales cast to 16 bits by a conversion; markers written to "
        "the wrong layers.",
        repairable=True,
    ),
    Rule(
        "int8.rowwise.shapes",
        "error",
        "INT8 weights and scales that do not fit",
        "Comfy INT8 layer {layer} has incompatible weight/scale shapes: {found}; expected {expected}{look}.",
        "{remedy}",
        "One scale per output row is stored as (N, 1), one scale for the layer as ().",
        repairable=True,
    ),
    Rule(
        "extra.int8.groupsize",
        "error",
        "impossible rotation sizes",
        "Comfy INT8 layer {layer} declares a rotation over groups of {found}; the maths exists for {expected}.",
        "The converter used another rotation than it says. Export the layer with groups of 16, 64 or 256.",
        "The rotation matrix is a Kronecker power of a 4x4 Hadamard matrix, so its size is a power of 4; one "
        "converter silently used another matrix for 512.",
    ),
    Rule(
        "extra.int8.input_size",
        "error",
        "inputs that the rotation does not divide",
        "Comfy INT8 layer {layer} has {found} inputs, which groups of {expected} do not divide.",
        "Export the layer with a smaller rotation group, or without rotation.",
    ),
    # -- W4A4 --------------------------------------------------------------------------------------------------------
    Rule(
        "w4a4.dtype",
        "error",
        "W4A4 layers of another type",
        "Comfy W4A4 layer {layer} needs I8 packed weights and F32 scales, got {found}.",
        "{remedy}",
        repairable=True,
    ),
    Rule(
        "w4a4.shapes",
        "error",
        "W4A4 weights and scales that do not fit",
        "Comfy W4A4 layer {layer} has incompatible weight/scale shapes: {found}; expected (N, K/2) and (N,){look}.",
        "The weight must be (out, in/2) and the scale 1-D of length out. {remedy}",
        "A convolution sent down the linear path; group scales stored under the channel scale's name; a transposed "
        "or extra dimension.",
        repairable=True,
    ),
    Rule(
        "crash.w4a4.groupsize",
        "error",
        "unreadable rotation sizes",
        "Comfy W4A4 layer {layer} declares convrot_groupsize {found}; expected {expected}.",
        REEXPORT,
    ),
    Rule(
        "w4a4.groupsize",
        "error",
        "impossible rotation sizes",
        "Comfy W4A4 layer {layer} declares convrot_groupsize {found}; expected {expected}.",
        "Export the layer with groups of 16, 64 or 256.",
    ),
    Rule(
        "w4a4.input_size",
        "error",
        "inputs that the groups do not divide",
        "Comfy W4A4 layer {layer} has {found} inputs; expected a multiple of {expected}.",
        "Leave this layer out of the quantisation or export it with a smaller rotation group.",
    ),
    Rule(
        "extra.w4a4.linear_dtype",
        "error",
        "unknown activation types",
        'Comfy W4A4 layer {layer} declares linear_dtype {found}; expected "int4" or "int8".',
        REEXPORT,
    ),
    # -- W4A8 --------------------------------------------------------------------------------------------------------
    Rule(
        "crash.w4a8.group_size",
        "error",
        "unreadable group sizes",
        "Comfy W4A8 layer {layer} declares group_size {found}; expected {expected}.",
        REEXPORT,
    ),
    Rule(
        "w4a8.group_size",
        "error",
        "impossible group sizes",
        "Comfy W4A8 layer {layer} declares group_size {found}; expected {expected}.",
        REEXPORT,
    ),
    Rule(
        "w4a8.dtype",
        "error",
        "W4A8 layers of another type",
        "Comfy W4A8 layer {layer} needs I8 packed weights and F8_E4M3 group scales, got {found}.",
        "{remedy}",
        repairable=True,
    ),
    Rule(
        "w4a8.channel_dtype",
        "error",
        "W4A8 row scales of another type",
        "Comfy W4A8 layer {layer} needs F32 weight_s_channel, got {found}.",
        "{remedy}",
        repairable=True,
    ),
    Rule(
        "w4a8.rank",
        "error",
        "W4A8 layers that are no linears",
        "Comfy W4A8 layer {layer} needs a 2D packed weight, got {found}{look}.",
        "Leave convolutions and expert banks out of the quantisation.",
    ),
    Rule(
        "w4a8.shapes",
        "error",
        "W4A8 weights and scales that do not fit",
        "Comfy W4A8 layer {layer} has incompatible weight/scale shapes: {found}; expected {expected}.",
        REEXPORT,
    ),
    Rule(
        "extra.w4a8.six_bit",
        "error",
        "6-bit weights under the 4-bit name",
        "Layer {layer} holds 6-bit weights ({found}) under the 4-bit name asym_w4a8_int8.",
        "This version runs the 4-bit format only. Get a 4-bit or 8-bit version of the model, or update Quant Loader.",
        "comfy-kitchen 0.2.40 writes 6-bit weights under the same format name: rows of 3K/4 bytes.",
    ),
    Rule(
        "w4a8.codebook",
        "error",
        "malformed codebooks",
        "Comfy W4A8 layer {layer} needs an F32 codebook of 16 values, got {found}.",
        REEXPORT,
    ),
    Rule(
        "w4a8.correction",
        "error",
        "malformed corrections",
        "Comfy W4A8 layer {layer} needs an F32 correction of shape {expected}, got {found}.",
        REEXPORT,
    ),
    Rule(
        "extra.w4a8.group",
        "error",
        "group sizes that the maths cannot do",
        "Comfy W4A8 layer {layer} has groups of {found} over {inputs} inputs; expected {expected}.",
        REEXPORT,
    ),
    Rule(
        "extra.w4a8.rotation",
        "error",
        "impossible rotation sizes",
        "Comfy W4A8 layer {layer} declares a rotation over groups of {found}; the maths exists for {expected}.",
        REEXPORT,
    ),
    Rule(
        "extra.w4a8.input_size",
        "error",
        "inputs that the rotation does not divide",
        "Comfy W4A8 layer {layer} has {found} inputs, which rotation groups of {expected} do not divide.",
        "Export the layer with a smaller rotation group.",
    ),
    # -- NVFP4 -------------------------------------------------------------------------------------------------------
    Rule(
        "nvfp4.dtype",
        "error",
        "NVFP4 layers of another type",
        "Comfy NVFP4 layer {layer} needs U8 packed weights and F8_E4M3 block scales, got {found}.",
        "{remedy}",
        repairable=True,
    ),
    Rule(
        "nvfp4.scale_2",
        "error",
        "malformed NVFP4 global scales",
        "Comfy NVFP4 layer {layer} needs one F32 value as weight_scale_2, got {found}.",
        "{remedy}",
        repairable=True,
    ),
    Rule(
        "nvfp4.rank",
        "error",
        "NVFP4 layers that are no linears",
        "Comfy NVFP4 layer {layer} needs a 2D packed weight, got {found}{look}.",
        "Flatten the kernel to (out, in*kh*kw/2), or leave convolutions and patch embeddings out of the "
        "quantisation; check that the marker is on the right layer.",
        "Convolutions or patch embeddings quantised without flattening; a marker on the wrong prefix.",
    ),
    Rule(
        "nvfp4.shapes",
        "error",
        "NVFP4 weights and scales that do not fit",
        "Comfy NVFP4 layer {layer} has incompatible weight/scale shapes: {found}; expected {expected}.",
        "{remedy}",
    ),
    Rule(
        "nvfp4.pre_quant_scale",
        "error",
        "malformed pre_quant_scale",
        "Comfy NVFP4 layer {layer} needs a BF16, F16 or F32 pre_quant_scale of shape {expected}, got {found}.",
        REEXPORT,
    ),
    Rule(
        "extra.nvfp4.scale_layout",
        "error",
        "ambiguous NVFP4 scale layout",
        "Comfy NVFP4 layer {layer} stores its block scales as {found}, which does not say in which order they are; "
        "expected {expected}.",
        "Export the layer with scales in the padded 128x4 order that ComfyUI writes. " + DECLARE,
        "Kernels read the scales in 128x4 tiles. Reading an unpadded tensor so turned 126 of 256 scales of a small "
        "layer into zero.",
    ),
    Rule(
        "extra.nvfp4.input_scale",
        "error",
        "malformed activation scales",
        "Comfy NVFP4 layer {layer} needs one float value as input_scale, got {found}.",
        "Remove the input_scale (activations are then scaled as they come) or export the layer again.",
    ),
    # -- Quanto ------------------------------------------------------------------------------------------------------
    Rule(
        "quanto.map_missing",
        "error",
        "no Quanto map",
        "The file says it is quantised with Quanto but has no quantization_map_base64 (its metadata: {found}).",
        REEXPORT,
        of_absence=True,
    ),
    Rule(
        "quanto.map_base64",
        "error",
        "unreadable Quanto map",
        "The Quanto map of the file cannot be read: {found}.",
        REDOWNLOAD,
    ),
    Rule(
        "quanto.map_empty",
        "error",
        "empty Quanto map",
        "The Quanto map must be an object with at least one layer, got {found}.",
        REEXPORT,
    ),
    Rule(
        "quanto.map_entries",
        "error",
        "malformed Quanto map",
        "The Quanto map entry of layer {layer} must be an object, got {found}.",
        REEXPORT,
    ),
    Rule(
        "crash.quanto.recursion",
        "error",
        "Quanto map nested too deeply",
        "The Quanto map is nested too deeply to be read.",
        REDOWNLOAD,
    ),
    Rule(
        "quanto.prefix_mismatch",
        "error",
        "Quanto map and tensors disagree",
        "Quanto layer {layer} {found}.",
        "The map and the tensors come from different files. Export the model again.",
        of_absence=True,
    ),
    Rule(
        "quanto.weights_type",
        "error",
        "Quanto weights of another type",
        'Quanto layer {layer} has weights of type {found}; only "qint8" is known.',
        "Get an int8 version of the model.",
    ),
    Rule(
        "quanto.activations_type",
        "error",
        "Quanto activations quantised",
        'Quanto layer {layer} quantises its activations ({found}); only weight-only files ("none") are known.',
        "Export the model with activations=None.",
    ),
    Rule(
        "quanto.missing_tensors",
        "error",
        "missing tensors",
        "Quanto layer {layer} lacks {found}; it needs {expected}.",
        REEXPORT,
        of_absence=True,
    ),
    Rule(
        "quanto.dense_and_packed",
        "error",
        "layers stored twice",
        "Quanto layer {layer} is stored twice: dense ({layer}.weight) and packed ({layer}.weight._data).",
        "The file does not say which is right. Export it again, frozen.",
    ),
    Rule(
        "extra.quanto.mixed",
        "error",
        "layers that the Quanto map does not declare",
        "Layer {layer} of this Quanto file has {found}; the Quanto map does not declare it, and nothing else is read "
        "in such a file.",
        "The file mixes two ways to quantise. Export the whole model with one tool.",
        "A marker in a Quanto file is not looked at, so the layer would be loaded as the numbers that its bytes spell.",
    ),
    Rule(
        "quanto.data",
        "error",
        "Quanto weights that are no INT8 linears",
        "Quanto layer {layer} needs a 2D I8 weight, got {found} {shape}{look}.",
        "Quantise linears only, and do not pass the file through tools that widen types.",
        "1-D or 3-D convolutions in the map; an export that widened the dtype; hand-made tensors.",
    ),
    Rule(
        "quanto.scale",
        "error",
        "malformed Quanto scales",
        "Quanto layer {layer} needs a BF16, F16 or F32 scale of shape {expected}, got {found}.",
        REEXPORT,
    ),
    Rule(
        "quanto.aux_scale",
        "error",
        "malformed Quanto auxiliary scales",
        "Quanto layer {layer} needs a BF16, F16 or F32 scalar as {tensor}, got {found}.",
        REEXPORT,
    ),
    Rule(
        "quanto.collision",
        "error",
        "two layers with one name",
        "Two Quanto layers of the file become the layer {layer} of the model: {found}.",
        "Keep one copy of the model in the file.",
    ),
    Rule(
        "extra.quanto.aux_not_one",
        "error",
        "Quanto activation scales in use",
        "Quanto layer {layer}: {tensor} is {found}; expected 1.",
        "The file was made for quantised activations. Export it with activations=None.",
        "Weight-only kernels drop these scales, which is right only when they are one.",
    ),
    Rule(
        "extra.quanto.undeclared",
        "error",
        "Quanto tensors without a declaration",
        "Layer {layer} is stored as Quanto does ({found}), but the file does not declare the format.",
        "The file's metadata was lost in a conversion: get the original file.",
        of_absence=True,
    ),
    # -- the deep check -----------------------------------------------------------------------------------------------
    Rule(
        "extra.deep.block_scale",
        "error",
        "NaN or negative block scales",
        "Layer {layer} holds block scales that are no scales: {found}; expected {expected}.",
        "The file is damaged. " + REDOWNLOAD,
        "No quantiser writes a NaN or negative block scale; one NaN makes a whole picture black.",
    ),
    Rule(
        "extra.deep.nonfinite",
        "error",
        "NaN or infinite numbers beside the weights",
        "Layer {layer}: its {tensor} holds {found}; expected {expected}.",
        "The file is damaged, or was made with an error. " + REDOWNLOAD + " If it is the same, get another version.",
        "Biases and corrections are added to every output: one NaN makes a whole picture black.",
    ),
    Rule(
        "extra.deep.zeros",
        "error",
        "weights overwritten with zeros",
        "The data of {tensor} is partly missing: {found}.",
        "A download or copy was cut short: " + REDOWNLOAD[0].lower() + REDOWNLOAD[1:],
        "A preallocated file keeps its full size while pieces of it were never written; it loads, and those "
        "weights are zero.",
    ),
    Rule(
        "extra.deep.zero_weight",
        "warning",
        "zeros where weights are expected",
        "The data of {tensor} may be missing: {found}.",
        "If the picture is wrong, the download was cut short: " + REDOWNLOAD[0].lower() + REDOWNLOAD[1:],
    ),
    Rule(
        "extra.deep.code_nan",
        "error",
        "weights that are no numbers",
        "Layer {layer} holds weights that are no numbers: {found}.",
        "The file is damaged or was converted from a damaged one. " + REDOWNLOAD,
        "One NaN weight makes a whole picture black.",
    ),
    Rule(
        "extra.deep.int8_min",
        "notice",
        "INT8 codes of -128",
        "Layer {layer} holds the INT8 code -128: {found}; quantisers of this format write {expected}.",
        "Nothing needs to be done unless the picture is wrong: then the weights may be of another kind than declared.",
    ),
    Rule(
        "extra.deep.int4_min",
        "warning",
        "4-bit codes of -8",
        "Layer {layer} holds the 4-bit code -8: {found}; quantisers of this format write {expected}.",
        "If the picture is wrong, the codes may be of another format (for example unsigned): "
        + REEXPORT[0].lower()
        + REEXPORT[1:],
    ),
    Rule(
        "extra.deep.rotation",
        "warning",
        "weights that do not look as declared: rotation",
        "Layer {layer} is declared as {expected}, but its weights look {found}: their distance from a Gaussian is "
        "{c_better} read so and "
        "{c_declared} read as declared (log of the fourth moment, {rows} sampled rows). This is an indication, not "
        "a proof.",
        "If the picture is noise, the marker is wrong: get the file from its publisher again, or declare what you "
        "know with `quant-loader repair FILE --declare`.",
        "A layer whose rotation is not what its marker says gives noise without any error.",
    ),
    Rule(
        "extra.deep.rotation_size",
        "warning",
        "weights that do not look as declared: rotation size",
        "Layer {layer} is declared as {expected}, but its weights look {found}: their distance from a Gaussian is "
        "{c_better} read so and "
        "{c_declared} read as declared (log of the fourth moment, {rows} sampled rows). This is an indication, not "
        "a proof.",
        "If the picture is noise, the marker is wrong: get the file from its publisher again, or declare what you "
        "know with `quant-loader repair FILE --declare`.",
        "Undoing a rotation with another group size leaves the weights mixed.",
    ),
    Rule(
        "extra.deep.nibble_order",
        "warning",
        "weights that do not look as declared: order of 4-bit codes",
        "The {format} layers look as if their 4-bit codes were stored with {found}; the format has {expected}. "
        "{against} of {count} signs that can "
        "tell say so, together {total} standard deviations. This is an indication, not a proof.",
        "If the picture is noise, the file was packed for another program. " + REEXPORT,
        "With the two codes of each byte exchanged, every pair of inputs is exchanged.",
    ),
    Rule(
        "extra.deep.scale_layout",
        "warning",
        "weights that do not look as declared: order of block scales",
        "Layer {layer} looks as if its block scales were stored {found}; kernels read them in {expected}. Read row "
        "by row, "
        "the sizes of {blocks} sampled blocks scatter by 2^{plain} and the correlation of codes and scales is "
        "{balance_plain} (sound files: below -0.2); as "
        "kernels read them, 2^{declared} and {balance_declared}. This is an indication, not a proof.",
        "If the picture is noisy or blurred, the file was written for another program. " + REEXPORT,
        "Each block then gets another block's scale: pictures are worse or noise, without any error.",
    ),
    Rule(
        "extra.deep.partial",
        "notice",
        "deep check cut short",
        "The deep check stopped after {expected}: {found} layers were looked at.",
        "Check the file on a faster disk to have all layers looked at.",
    ),
    # -- what compatible understood ----------------------------------------------------------------------------------
    Rule(
        "extra.dialect",
        "notice",
        "read under compatible rules",
        "Layer {layer}: {found}.",
        "Nothing needs to be done. " + REPAIR + " writes the same layer in the standard form.",
        repairable=True,
    ),
    Rule(
        "extra.dialect.file",
        "notice",
        "read under compatible rules",
        "{found}.",
        "Nothing needs to be done. " + REPAIR + " writes the same file in the standard form.",
        repairable=True,
    ),
    Rule(
        "extra.storage.plain",
        "notice",
        "8-bit floats used as plain storage",
        "Weights stored as 8-bit floats without any scale: {found}. This is plain storage, loaded as the stock loader "
        "does.",
        "Nothing needs to be done.",
    ),
    Rule(
        "extra.runtime",
        "notice",
        "another runtime would refuse this file",
        "Another runtime (sglang) would refuse this file: {found}.",
        "This does not concern ComfyUI. {remedy}",
    ),
    Rule(
        "extra.rules.compatible",
        "notice",
        "accepted by compatible rules",
        "This file is refused by the strict rules only: rules = compatible accepts it.",
        "Set rules to compatible.{remedy}",
    ),
)

RULES: dict[str, Rule] = {rule.id: rule for rule in _ROWS}
"""The catalogue, by rule id."""
