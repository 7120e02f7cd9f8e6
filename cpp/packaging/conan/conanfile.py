# SPDX-License-Identifier: Apache-2.0
"""Conan recipe of the C++ library: `conan create cpp/packaging/conan`."""

from pathlib import Path

from conan import ConanFile
from conan.tools.build import check_min_cppstd, stdcpp_library
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load


class BrecciaConan(ConanFile):
    name = "breccia"
    description = "Block-scaled low-precision tensors: FP8, MXFP8/6/4, NVFP4, INT8, INT4"
    license = "Apache-2.0"
    homepage = "https://github.com/breccia/breccia"
    url = "https://github.com/breccia/breccia"
    topics = ("quantization", "fp8", "fp4", "mx", "int4")
    package_type = "static-library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"fPIC": [True, False], "avx512": [True, False]}
    default_options = {"fPIC": True, "avx512": True}
    implements = ["auto_shared_fpic"]

    def set_version(self):
        cmake = load(self, Path(self.recipe_folder, "..", "..", "..", "CMakeLists.txt"))
        self.version = cmake.partition("project(breccia VERSION ")[2].partition(" ")[0]

    def export_sources(self):
        root = str(Path(self.recipe_folder, "..", "..", ".."))
        for pattern in ("CMakeLists.txt", "LICENSE", "cpp/*"):
            copy(self, pattern, root, self.export_sources_folder)

    def validate(self):
        check_min_cppstd(self, 20)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["BRECCIA_NO_AVX512"] = not self.options.avx512
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build(target="breccia_c")  # and the core, which it links

    def package(self):
        CMake(self).install(component="breccia_dev")
        copy(self, "LICENSE", self.source_folder, str(Path(self.package_folder, "licenses")))

    def package_info(self):
        self.cpp_info.libs = ["breccia_c", "breccia"]
        self.cpp_info.set_property("cmake_file_name", "breccia")
        self.cpp_info.set_property("cmake_target_name", "breccia::breccia")
        self.cpp_info.set_property("cmake_target_aliases", ["breccia::c"])
        self.cpp_info.set_property("pkg_config_name", "breccia")
        if self.settings.os in ("Linux", "FreeBSD"):
            self.cpp_info.system_libs = ["pthread", "m"]
        if runtime := stdcpp_library(self):  # a program in C, linked as such, does not bring it
            self.cpp_info.system_libs.append(runtime)
