"""Packaging: every fact comes from settings.ini."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
settings = config["DEFAULT"]
extras = {extra: settings[f"{extra}_requirements"].split() for extra in ("dev", "docs", "sweep")}
readme = Path("README.md")

setup(
    name=settings["lib_name"],
    version=settings["version"],
    description=settings["description"],
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    author=settings["author"],
    author_email=settings["author_email"],
    url=settings["git_url"],
    license=settings["license_name"],
    keywords=settings["keywords"],
    packages=find_packages(include=["vitposnb", "vitposnb.*"]),
    package_data={"vitposnb": ["data_files/*"]},
    python_requires=f">={settings['min_python']}",
    install_requires=settings["requirements"].split(),
    extras_require=extras,
    entry_points={"nbdev": [f"vitposnb={settings['lib_path']}._modidx:d"]},
    zip_safe=False,
)
