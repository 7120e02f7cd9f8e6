# Fails unless PROGRAM needs libbreccia_c.so.1 and, by itself, no other library of breccia's: one of its versions follows
# another without the program being linked anew.
execute_process(COMMAND ${READELF} -d ${PROGRAM} OUTPUT_VARIABLE section COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "libbreccia[^]]*" needed "${section}")
if(NOT needed STREQUAL "libbreccia_c.so.1")
  message(FATAL_ERROR "a C program must need libbreccia_c.so.1 alone, got ${needed}")
endif()
