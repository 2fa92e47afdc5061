# Installs the build folder BUILD, and builds examples/minimal of SOURCE against what was installed: with
# find_package(fusedmoe) and with pkg-config, where there is one. Both must run a layer.
set(folder "${BUILD}/install-test")
set(prefix "${folder}/prefix")
set(checkpoint "${SOURCE}/tests/golden/checkpoints/mixtral-modelopt-nvfp4")
file(REMOVE_RECURSE "${folder}")
file(MAKE_DIRECTORY "${folder}")

function(run_or_fail)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE output ECHO_ERROR_VARIABLE)
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(expect_a_layer program)
  run_or_fail("${program}" "${checkpoint}" "${checkpoint}/io/m5.safetensors")
  if(NOT output MATCHES "CPU_FUSED.*output \\[[0-9]+, [0-9]+\\], first value -?[0-9]")
    message(FATAL_ERROR "${program} says\n${output}")
  endif()
endfunction()

run_or_fail("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${prefix}")
run_or_fail("${prefix}/bin/fusedmoe" version)

run_or_fail("${CMAKE_COMMAND}" -S "${SOURCE}/examples/minimal" -B "${folder}/build" -G "${GENERATOR}"
  -D "CMAKE_CXX_COMPILER=${CXX}" -D "CMAKE_PREFIX_PATH=${prefix}")
run_or_fail("${CMAKE_COMMAND}" --build "${folder}/build")
expect_a_layer("${folder}/build/minimal")

find_program(pkg_config pkg-config)
if(pkg_config)
  set(ENV{PKG_CONFIG_PATH} "${prefix}/lib/pkgconfig")
  run_or_fail("${pkg_config}" --cflags --libs fusedmoe)
  separate_arguments(flags UNIX_COMMAND "${output}")
  run_or_fail("${CXX}" "${SOURCE}/examples/minimal/main.cpp" -o "${folder}/minimal" ${flags})
  expect_a_layer("${folder}/minimal")
endif()
