"""Golden model of DeepSeek V4.1 mega attention.

It computes what the contract *means*, on heads, dims, tokens and cache rows in their natural order,
and knows byte layouts only where a check has to read or predict them. Torch and the standard
library are its only imports, and it shares no code with the production package, so that a mistake
in one cannot hide in the other. Start at ``reference.layer.rank_step`` and read downwards:

``layer``      one tensor-parallel rank's whole step, and the sum over ranks
``attention``  sparse attention with sink and inverse RoPE, each value beside an error bound
``rows``       where attention's K/V rows come from: paged caches or a flat workspace
``linear``     the three FP8 linears, with bounds
``indices``    which rows a token attends to
``cache``      what an insertion writes, and which bytes are also acceptable
``records``    cache records and page layouts
``layouts``    fused weight, Q and output layouts, to and from natural order
``rope``       tables and rotations
``cast``, ``quantize``, ``codes``   block quantizers and number formats, exact on bits
``model``      the geometry

Arithmetic is float32 or float64 by argument; tensors may live on any device.
"""
