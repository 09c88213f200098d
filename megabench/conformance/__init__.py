"""The validation suite as a pytest suite, for a kernel author's own CI:

    pytest --pyargs megabench.conformance --backend my_kernels:MyBackend --cases ci

One test a case and stage group, run in worker processes; docs/conformance.md.
"""
