"""setup.py of the wheel that carries compiled libraries: for one platform and any Python, whose API they do not use.

`tests/support/platform_wheel.py` puts it beside pyproject.toml; any other build has none.
"""

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class _Compiled(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class _AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=_Compiled, cmdclass={"bdist_wheel": _AnyPython})
