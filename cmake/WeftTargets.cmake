# What all of Weft's own targets have in common.

# The highest level of _FORTIFY_SOURCE that compiler and C library know without a warning; it needs an optimised build.
if(WEFT_HARDEN AND NOT DEFINED WEFT_FORTIFY)
  include(CheckCXXSourceCompiles)
  set(WEFT_FORTIFY 0 CACHE INTERNAL "Level of _FORTIFY_SOURCE")
  foreach(level IN ITEMS 2 3)
    set(CMAKE_REQUIRED_FLAGS "-Werror -O2 -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=${level}")
    check_cxx_source_compiles("#include <cstdio>\nint main() { return 0; }" WEFT_HAS_FORTIFY_${level})
    if(WEFT_HAS_FORTIFY_${level})
      set(WEFT_FORTIFY ${level} CACHE INTERNAL "Level of _FORTIFY_SOURCE")
    endif()
  endforeach()
  unset(CMAKE_REQUIRED_FLAGS)
endif()

# weft_target(<target>): C++20, hidden symbols, warnings, sanitizers. All PRIVATE: none of it reaches a consumer.
function(weft_target target)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wconversion -Wshadow>
    # g++ leaves signs out of -Wconversion; so that a warning means the same with both compilers, clang does too.
    $<$<COMPILE_LANG_AND_ID:CXX,Clang,AppleClang>:-Wno-sign-conversion>
    # By hand: CMake 3.25 does not know C++20 for nvcc (and takes CXX_STANDARD, so that is not set here).
    $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 -Xcompiler=-Wall,-Wextra>)
  if(WEFT_WERROR)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Werror> $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
    if(CMAKE_BUILD_TYPE STREQUAL "Release")  # bounded waits of other builds take registers
      set(launchers ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/no_serial_products.sh ${CMAKE_CUDA_COMPILER_LAUNCHER})
      set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER "${launchers}")
    endif()
  endif()
  if(WEFT_HARDEN)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fstack-protector-strong>
      $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=${WEFT_FORTIFY}>)
    target_link_options(${target} PRIVATE LINKER:-z,relro,-z,now)
  endif()
  if(WEFT_SANITIZE)
    string(REPLACE ";" "," sanitizers "${WEFT_SANITIZE}")
    set(flags -fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    # With checks in between g++ takes what the standard library initialises for uninitialised.
    target_compile_options(${target} PRIVATE ${flags} $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
    target_link_options(${target} PRIVATE ${flags})
  endif()
endfunction()

# weft_unity(<target> [ALONE <files...>]): compiles the .cpp files of each folder as one, several times quicker than file by
# file: most of a file's time is its headers. So names of anonymous namespaces must differ within a folder; ALONE: files
# that are compiled by themselves. Those with options of their own are too, and CUDA code, whose rooms are built elsewhere.
function(weft_unity target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "ALONE")
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cpp$")
  list(FILTER sources EXCLUDE REGEX "/(cuda|nccl|sm90)/")
  foreach(source IN LISTS sources)
    cmake_path(GET source FILENAME name)
    cmake_path(GET source PARENT_PATH folder)
    if(NOT name IN_LIST arg_ALONE)
      cmake_path(ABSOLUTE_PATH folder)
      cmake_path(RELATIVE_PATH folder BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
      string(MAKE_C_IDENTIFIER "${folder}" group)
      set_property(SOURCE ${source} PROPERTY UNITY_GROUP ${group})
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${WEFT_UNITY} UNITY_BUILD_MODE GROUP)
  if(WEFT_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # An included file is taken for a header, where a member of an unnamed namespace's type would be wrong.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-subobject-linkage>)
  endif()
endfunction()

# weft_ctest(<name> [ALONE] [LONG] LABEL <label> COMMAND <command...> [TIMEOUT s] [COST c] [ENVIRONMENT NAME=value...])
# The prefix keeps tests of several builds apart when one ctest runs them all (make test).
# LONG: left to make test-all, as is every test of a build that has a prefix; these carry the label `long` too.
# COST: long tests start first, so that none is left running alone at the end. ALONE: beside no other one.
function(weft_ctest name)
  cmake_parse_arguments(arg "ALONE;LONG" "LABEL;TIMEOUT;COST" "COMMAND;ENVIRONMENT" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 1800)
  endif()
  if(NOT arg_COST)
    set(arg_COST 1)
  endif()
  if(arg_LONG OR WEFT_TEST_PREFIX)
    list(APPEND arg_LABEL long)
  endif()
  # Dozens of processes import torch, which takes three times as long where Python may not keep what it has compiled.
  set(compiled PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=${PROJECT_BINARY_DIR}/pycache)
  add_test(NAME ${WEFT_TEST_PREFIX}${name} COMMAND ${arg_COMMAND} WORKING_DIRECTORY ${PROJECT_BINARY_DIR})
  set_tests_properties(${WEFT_TEST_PREFIX}${name} PROPERTIES
    LABELS "${arg_LABEL}" TIMEOUT ${arg_TIMEOUT} COST ${arg_COST} RUN_SERIAL ${arg_ALONE}
    ENVIRONMENT "UBSAN_OPTIONS=print_stacktrace=1;${compiled};${arg_ENVIRONMENT}")
endfunction()

# weft_mpi_ctest(<name> <ranks> ...): the same over MPI. MPI itself leaks a little, by design.
function(weft_mpi_ctest name ranks)
  cmake_parse_arguments(arg "" "" "COMMAND" ${ARGN})
  list(POP_FRONT arg_COMMAND program)
  weft_ctest(${name} ${arg_UNPARSED_ARGUMENTS} ENVIRONMENT ASAN_OPTIONS=detect_leaks=0
             COMMAND ${PROJECT_SOURCE_DIR}/tools/mpirun.sh -np ${ranks} $<TARGET_FILE:${program}> ${arg_COMMAND})
endfunction()
