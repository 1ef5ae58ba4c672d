# Installs Weft, then builds and runs the consumer against it.
#   cmake -Dbuild=<Weft's build> -Dcompiler=<c++> -Dconfig=<build type> -Dgenerator=<generator> -P test.cmake
set(prefix ${build}/consumer/prefix)
set(consumer ${build}/consumer/build)
file(REMOVE_RECURSE ${build}/consumer)  # a file that is no longer installed must be missed

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()
run(${CMAKE_COMMAND} --install ${build} --config ${config} --prefix ${prefix})
run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${consumer} -G ${generator}
    -DCMAKE_BUILD_TYPE=${config} -DCMAKE_CXX_COMPILER=${compiler} -DCMAKE_PREFIX_PATH=${prefix})
run(${CMAKE_COMMAND} --build ${consumer} --config ${config})
run(${consumer}/consumer)
