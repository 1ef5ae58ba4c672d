# What all of Weft's own targets have in common.

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
  if(WEFT_SANITIZE)
    string(REPLACE ";" "," sanitizers "${WEFT_SANITIZE}")
    set(flags -fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_compile_options(${target} PRIVATE ${flags})
    target_link_options(${target} PRIVATE ${flags})
  endif()
endfunction()

# weft_ctest(<name> [ALONE] LABEL <label> COMMAND <command...> [TIMEOUT s] [COST c] [ENVIRONMENT NAME=value...])
# The prefix keeps tests of several builds apart when one ctest runs them all (make test).
# COST: long tests start first, so that none is left running alone at the end. ALONE: beside no other one.
function(weft_ctest name)
  cmake_parse_arguments(arg "ALONE" "LABEL;TIMEOUT;COST" "COMMAND;ENVIRONMENT" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)
  endif()
  if(NOT arg_COST)
    set(arg_COST 1)
  endif()
  add_test(NAME ${WEFT_TEST_PREFIX}${name} COMMAND ${arg_COMMAND} WORKING_DIRECTORY ${PROJECT_BINARY_DIR})
  set_tests_properties(${WEFT_TEST_PREFIX}${name} PROPERTIES
    LABELS ${arg_LABEL} TIMEOUT ${arg_TIMEOUT} COST ${arg_COST} RUN_SERIAL ${arg_ALONE}
    ENVIRONMENT "UBSAN_OPTIONS=print_stacktrace=1;${arg_ENVIRONMENT}")
endfunction()

# weft_mpi_ctest(<name> <ranks> ...): the same over MPI. MPI itself leaks a little, by design.
function(weft_mpi_ctest name ranks)
  cmake_parse_arguments(arg "" "" "COMMAND" ${ARGN})
  list(POP_FRONT arg_COMMAND program)
  weft_ctest(${name} ${arg_UNPARSED_ARGUMENTS} ENVIRONMENT ASAN_OPTIONS=detect_leaks=0
             COMMAND ${PROJECT_SOURCE_DIR}/tools/mpirun.sh -np ${ranks} $<TARGET_FILE:${program}> ${arg_COMMAND})
endfunction()
