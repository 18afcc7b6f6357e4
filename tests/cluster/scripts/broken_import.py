"""A script with a typing error in an import."""

import numppy  # type: ignore[import-not-found]  # noqa: F401
