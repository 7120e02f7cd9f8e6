vcpkg_from_github(
  OUT_SOURCE_PATH SOURCE_PATH
  REPO breccia/breccia
  REF "v${VERSION}"
  SHA512 0 # of the archive of the tag: vcpkg prints it
  HEAD_REF main)
vcpkg_check_linkage(ONLY_STATIC_LIBRARY)

vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}")
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/breccia)
vcpkg_fixup_pkgconfig()

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
