"""Families of decoders: a file for each lineage, with a record for each ``model_type``. All files are imported."""

from importlib import import_module
from pkgutil import iter_modules

from spmd_engine.models.families.family import Family

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
_RECORDS = [record for module in _MODULES for record in vars(module).values() if isinstance(record, Family)]
#: Records by name, which is the ``model_type`` with hyphens.
FAMILIES = {record.name: record for record in sorted(_RECORDS, key=lambda record: record.name)}
