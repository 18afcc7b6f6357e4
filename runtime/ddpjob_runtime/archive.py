"""Finds modules in the runtime's archive without compiling each of them twice."""

from __future__ import annotations

import zipimport


class Archive(zipimport.zipimporter):
    """Finds a module's file name without compiling it.

    zipimport's own loader compiles each module twice.
    """

    def get_filename(self, fullname: str) -> str:
        """Return the path of the module's source in the archive."""
        path = f"{self.archive}/{self.prefix}{fullname.rpartition('.')[2]}"
        return path + ("/__init__.py" if self.is_package(fullname) else ".py")
