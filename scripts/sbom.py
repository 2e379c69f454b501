"""Writes the bill of materials of one image: CycloneDX 1.6, as JSON.

    sbom.py cpu --inventory build/sbom/cpu/inventory.json --out build/sbom/baton-cpu.cdx.json

What is listed is what the image has (deploy/image/inventory.py), and the library in the chat page;
hashes come from the locks. A
Python package that Baton's environment has and the lock does not is an error: the image was built
another way.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, License
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.utils import canonicalize_name

import lock_base
import lock_images
import vendor

TARGETS = tuple(lock_images.IMAGES)
LONGEST_LICENSE = 80
"""A longer one is the licence's text, not its name."""
_CLASSIFIER = "License :: OSI Approved :: "
_licenses = LicenseFactory()


def bom_of(target: str, inventory: dict[str, Any], version: str, revision: str) -> Bom:
    """Raises ValueError for an image that is not the one of its lock."""
    pinned = lock_images.pins((lock_images.LOCKS / f"{target}.txt").read_text())
    components = [
        *_python(inventory["python_packages"], pinned),
        *_base_python(inventory),
        *_debian(inventory),
        _of_page(),
    ]
    image = Component(
        name=f"baton-{target}",
        version=version,
        type=ComponentType.CONTAINER,
        bom_ref=f"baton-{target}",
        licenses=[_licenses.make_from_string("Apache-2.0")],
        properties=[
            Property(name="baton:revision", value=revision),
            Property(name="baton:base-image", value=inventory["base"]),
        ],
    )
    bom = Bom(components=components)
    bom.metadata.component = image
    bom.register_dependency(image, components)
    return bom


def text_of(bom: Bom) -> str:
    """Raises ValueError for one that is not valid by CycloneDX' own schema."""
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if fault is not None:
        raise ValueError(f"not valid: {fault}")
    return text + "\n"


def _python(
    packages: Iterable[dict[str, Any]], pinned: dict[str, lock_images.Pin]
) -> Iterator[Component]:
    for package in packages:
        name = canonicalize_name(package["name"])
        if package["sha256"] is not None:
            hashes: tuple[str, ...] = (package["sha256"],)
        elif name in pinned and pinned[name].version == package["version"]:
            hashes = pinned[name].hashes
        else:
            raise ValueError(f"{name} {package['version']} is in the image and not in its lock")
        yield _pypi(package, hashes)


def _base_python(inventory: dict[str, Any]) -> Iterator[Component]:
    """The interpreter and what came with it, unless they are Debian's and listed there."""
    python = inventory["python"]
    if python["prefix"] == "/usr":
        return
    yield Component(
        name="cpython",
        version=python["version"],
        type=ComponentType.APPLICATION,
        bom_ref=f"cpython@{python['version']}",
        purl=PackageURL("generic", None, "cpython", python["version"]),
        licenses=[_licenses.make_from_string("Python-2.0.1")],
    )
    for package in inventory["base_python_packages"]:
        yield _pypi(package, (), ref="base:")


def _pypi(package: dict[str, Any], hashes: tuple[str, ...], ref: str = "") -> Component:
    purl = PackageURL("pypi", None, canonicalize_name(package["name"]), package["version"])
    return Component(
        name=package["name"],
        version=package["version"],
        type=ComponentType.LIBRARY,
        bom_ref=f"{ref}{purl}",
        purl=purl,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=one) for one in hashes],
        licenses=_python_licenses(package),
    )


def _python_licenses(package: dict[str, Any]) -> list[License]:
    """By what a package says best: an SPDX expression, else a short name, else its classifiers."""
    said = (package["license"] or "").strip()
    if "\n" in said or len(said) > LONGEST_LICENSE or said == "UNKNOWN":
        said = ""
    if package["expression"] or said:
        return [_licenses.make_from_string(package["expression"] or said)]
    names = [one.removeprefix(_CLASSIFIER) for one in package["classifiers"]]
    return [DisjunctiveLicense(name=name) for name in names]


def _debian(inventory: dict[str, Any]) -> Iterator[Component]:
    system = inventory["os"]
    distro = f"{system.get('ID', 'debian')}-{system.get('VERSION_ID', 'unknown')}"
    hashes = dict(_debian_hashes())
    for package in inventory["debian_packages"]:
        name, version, architecture = (package[x] for x in ("name", "version", "architecture"))
        purl = PackageURL(
            "deb", "debian", name, version, qualifiers={"arch": architecture, "distro": distro}
        )
        digest = hashes.get((name, version.partition(":")[2] or version, architecture))
        yield Component(
            name=name,
            version=version,
            type=ComponentType.LIBRARY,
            bom_ref=str(purl),
            purl=purl,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)] if digest else [],
            licenses=[DisjunctiveLicense(name=one) for one in package["licenses"]],
        )


def _of_page() -> Component:
    """The library in the router's chat page. Baton is in every image."""
    lock = vendor.locked()
    purl = PackageURL("npm", None, lock["name"], lock["version"])
    return Component(
        name=lock["name"],
        version=lock["version"],
        type=ComponentType.LIBRARY,
        bom_ref=str(purl),
        purl=purl,
        hashes=[
            HashType(alg=HashAlgorithm.SHA_256, content=file["sha256"])
            for name, file in lock["files"].items()
            if name.endswith(".js")
        ],
        licenses=[_licenses.make_from_string(lock["license"])],
    )


def _debian_hashes() -> Iterator[tuple[tuple[str, str, str], str]]:
    """By name, version without its epoch, and architecture, as a package's file is called."""
    for line in lock_base.COMPILER.read_text().splitlines():
        if not line.startswith("from "):
            digest, _, path = line.split()
            name, version, architecture = unquote(path).rsplit("/", 1)[1].split("_")
            yield (name, version, architecture.removesuffix(".deb")), digest


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the bill of materials of one image.")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--inventory", type=Path, required=True, help="what the image has")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--version", default="dev", help="of the image")
    parser.add_argument("--revision", default="unknown", help="the commit that it was built from")
    args = parser.parse_args(argv)
    inventory = json.loads(args.inventory.read_text())
    try:
        text = text_of(bom_of(args.target, inventory, args.version, args.revision))
    except ValueError as error:
        print(f"sbom: {error}", file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text)
    print(f"{args.out}: {len(json.loads(text)['components'])} components")
    return 0


if __name__ == "__main__":
    sys.exit(main())
