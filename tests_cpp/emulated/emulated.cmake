# Compiles the backends for AVX-512, and the unit of avx2 for AVX-VNNI, to plain code: their <immintrin.h> is the one in this folder.
find_path(SIMDE_INCLUDE_DIR simde/x86/avx512.h)
if(NOT SIMDE_INCLUDE_DIR)
  include(FetchContent)
  FetchContent_Declare(simde URL https://github.com/simd-everywhere/simde/archive/refs/tags/v0.7.4.tar.gz)
  FetchContent_MakeAvailable(simde)
  set(SIMDE_INCLUDE_DIR ${simde_SOURCE_DIR})
endif()

# Other sources are compiled as without emulation, so that a compiler cache has them.
set_source_files_properties(cpp/src/runtime/dispatch.cpp PROPERTIES COMPILE_DEFINITIONS BRECCIA_EMULATE_AVX512)
# -I goes before the compiler's own headers; SIMDe, as a system's header, is spared our warnings. It adds signed lanes
# that wrap.
set(emulation "-O1;-fwrapv;-Wno-ignored-attributes;-I${CMAKE_CURRENT_LIST_DIR};-idirafter;${SIMDE_INCLUDE_DIR}")
foreach(backend IN ITEMS avx512 avx512_bf16 amx)
  target_compile_definitions(breccia_${backend} PRIVATE BRECCIA_EMULATED_BACKEND)
  target_compile_options(breccia_${backend} PRIVATE ${emulation})
endforeach()
set_source_files_properties(cpp/src/backends/avx2/integer_vnni.cpp PROPERTIES
  COMPILE_DEFINITIONS BRECCIA_EMULATED_BACKEND COMPILE_OPTIONS "${emulation}")
