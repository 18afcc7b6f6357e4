"""Imports modules from the runtime's archive, and compiles each of them only once."""

from __future__ import annotations

import zipimport


class Archive(zipimport.zipimporter):
    """Finds modules in an archive, and compiles each of them only once.

    zipimport's own loader compiles a module twice: first to find its file name, and then to run it.
    """

    def get_filename(self, fullname: str) -> str:
        """Return the path of the module's source in the archive."""
        path = f"{self.archive}/{self.prefix}{fullname.rpartition('.')[2]}"
        return path + ("/__init__.py" if self.is_package(fullname) else ".py")
