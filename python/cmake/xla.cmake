# XLA's foreign function interface is a set of headers that jaxlib ships. Where the Python that builds the extension has
# them, compiled JAX code calls the core directly; elsewhere it calls back through Python.
if(NOT DEFINED BRECCIA_XLA_INCLUDE_DIR)
  set(find_jaxlib "import importlib.util as u
s = u.find_spec('jaxlib')
print(s.submodule_search_locations[0] + '/include' if s else '')")
  execute_process(COMMAND ${Python_EXECUTABLE} -c "${find_jaxlib}"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT EXISTS "${found}/xla/ffi/api/ffi.h")
    set(found "")
  endif()
  set(BRECCIA_XLA_INCLUDE_DIR "${found}" CACHE PATH "Where xla/ffi/api/ffi.h is; empty to do without")
endif()
if(BRECCIA_XLA_INCLUDE_DIR)
  target_sources(_core PRIVATE python/src/xla/handlers.cpp)
  target_include_directories(_core SYSTEM PRIVATE ${BRECCIA_XLA_INCLUDE_DIR})
  target_compile_definitions(_core PRIVATE BRECCIA_XLA)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # the headers name members like their types
    set_source_files_properties(python/src/xla/handlers.cpp PROPERTIES COMPILE_OPTIONS "-fpermissive;-Wno-error")
  endif()
  message(STATUS "JAX calls the core through XLA's foreign function interface: ${BRECCIA_XLA_INCLUDE_DIR}")
endif()
