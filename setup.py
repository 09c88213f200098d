"""The one thing pyproject.toml cannot say: cases/ ships inside the wheel under another name."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["megabench", "megabench.*", "reference", "reference.*"]),
        "megabench.case_files",
    ],
    package_dir={"megabench.case_files": "cases"},
)
