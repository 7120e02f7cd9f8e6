# What `cmake --install` gives a C++ user: headers, the libraries, a CMake package and pkg-config files.
# One component, so that a Python wheel built from the same tree can leave it out.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(breccia_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/breccia)

install(
  TARGETS breccia breccia_c
  EXPORT breccia-targets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT breccia_dev
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT breccia_dev
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT breccia_dev)
install(
  DIRECTORY ${PROJECT_SOURCE_DIR}/cpp/include/breccia
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT breccia_dev
  FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h")
install(
  EXPORT breccia-targets
  NAMESPACE breccia::
  DESTINATION ${breccia_package_dir}
  COMPONENT breccia_dev)

# What programs link that no C++ compiler links; objects of clang-cl name their libraries themselves.
set(breccia_cxx_libraries stdc++ m)
if(MSVC)
  set(breccia_cxx_libraries)
elseif("c++" IN_LIST CMAKE_CXX_IMPLICIT_LINK_LIBRARIES)
  set(breccia_cxx_libraries c++ m)
endif()
list(TRANSFORM breccia_cxx_libraries PREPEND " -l" OUTPUT_VARIABLE breccia_pc_cxx_libraries)
list(JOIN breccia_pc_cxx_libraries "" breccia_pc_cxx_libraries)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/breccia-config.cmake.in breccia-config.cmake
                              INSTALL_DESTINATION ${breccia_package_dir})
write_basic_package_version_file(breccia-config-version.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/breccia-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/breccia-config-version.cmake
  DESTINATION ${breccia_package_dir}
  COMPONENT breccia_dev)

# The prefix is spelled relative to the .pc file, so the tree can be installed anywhere with --prefix.
# APPEND keeps a directory that the builder gave as absolute.
file(RELATIVE_PATH breccia_pc_to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" breccia_pc_to_prefix ${breccia_pc_to_prefix})
cmake_path(APPEND breccia_pc_libdir "\${prefix}" ${CMAKE_INSTALL_LIBDIR})
cmake_path(APPEND breccia_pc_includedir "\${prefix}" ${CMAKE_INSTALL_INCLUDEDIR})
if(BUILD_SHARED_LIBS)
  set(breccia_pc_cflags " -DBRECCIA_SHARED")
endif()
# A program links the core itself only where that is static: the shared C library finds its own.
set(breccia_pc_private)
if(BUILD_SHARED_LIBS)
  set(breccia_pc_private .private)
endif()
configure_file(${CMAKE_CURRENT_LIST_DIR}/breccia.pc.in breccia.pc @ONLY)
configure_file(${CMAKE_CURRENT_LIST_DIR}/breccia_c.pc.in breccia_c.pc @ONLY)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/breccia.pc ${CMAKE_CURRENT_BINARY_DIR}/breccia_c.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
  COMPONENT breccia_dev)
