"""The `sm90` backend: CUDA C++ for Hopper (sm_90a), compiled at run time."""
