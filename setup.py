"""Installs one package, hyvideo. The programs, configs and assets become its folder ``project``,
which is the root of an installed copy as the repository is of a clone.
"""

from setuptools import find_namespace_packages, setup

PROJECT = "hyvideo.project"
FOLDERS = ("scripts", "studies", "configs", "assets")

inside = find_namespace_packages(
    include=[pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")],
    exclude=["*__pycache__*"],
)
setup(
    packages=[
        *find_namespace_packages(include=["hyvideo", "hyvideo.*"], exclude=["*__pycache__*"]),
        PROJECT,
        *(f"{PROJECT}.{name}" for name in inside),
    ],
    package_dir={PROJECT: "."},
)
