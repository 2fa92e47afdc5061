# Installs the build folder BUILD, and builds the examples of SOURCE against what was installed: with
# find_package(fusedmoe) and with pkg-config, where there is one. All must run a layer.
set(folder "${BUILD}/install-test")
set(prefix "${folder}/prefix")
set(checkpoint "${SOURCE}/tests/golden/checkpoints/mixtral-modelopt-nvfp4")
file(REMOVE_RECURSE "${folder}")
file(MAKE_DIRECTORY "${folder}")

function(run_or_fail)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE output ECHO_ERROR_VARIABLE)
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(expect_a_layer program)  # ARGN: what it is given
  run_or_fail("${program}" ${ARGN})
  if(NOT output MATCHES "CPU_FUSED.*output \\[[0-9]+, [0-9]+\\], first value -?[0-9]")
    message(FATAL_ERROR "${program} says\n${output}")
  endif()
endfunction()

run_or_fail("${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${prefix}")
run_or_fail("${prefix}/bin/fusedmoe" version)

# `make install` builds the target fusedmoe_installed alone: it has to make everything that was copied here.
if(GENERATOR STREQUAL "Ninja")
  find_program(ninja ninja REQUIRED)
  run_or_fail("${ninja}" -C "${BUILD}" -t query fusedmoe_installed)
  set(made "${output}")
  file(GLOB copied "${prefix}/lib/lib*" "${prefix}/bin/*")
  foreach(file IN LISTS copied)
    get_filename_component(name "${file}" NAME)
    string(REGEX REPLACE "\\.so.*" ".so" name "${name}")  # without its version
    if(NOT made MATCHES " ${name}\n")
      message(FATAL_ERROR "${name} is installed, and the target fusedmoe_installed does not make it")
    endif()
  endforeach()
endif()

set(options_minimal "")
set(options_c -D CMAKE_DISABLE_FIND_PACKAGE_fmt=ON)  # the component c asks for no other package
foreach(example IN ITEMS minimal c)
  run_or_fail("${CMAKE_COMMAND}" -S "${SOURCE}/examples/${example}" -B "${folder}/${example}" -G "${GENERATOR}"
    -D "CMAKE_CXX_COMPILER=${CXX}" -D "CMAKE_C_COMPILER=${CC}" -D "CMAKE_PREFIX_PATH=${prefix}" ${options_${example}})
  run_or_fail("${CMAKE_COMMAND}" --build "${folder}/${example}")
endforeach()
set(input "${checkpoint}/io/m5.safetensors")
expect_a_layer("${folder}/minimal/minimal" "${checkpoint}" "${input}")
expect_a_layer("${folder}/c/c" "${checkpoint}")

find_program(pkg_config pkg-config)
if(pkg_config)
  set(ENV{PKG_CONFIG_PATH} "${prefix}/lib/pkgconfig")
  run_or_fail("${pkg_config}" --cflags --libs fusedmoe)
  separate_arguments(flags UNIX_COMMAND "${output}")
  run_or_fail("${CXX}" "${SOURCE}/examples/minimal/main.cpp" -o "${folder}/with_pkg_config" ${flags})
  expect_a_layer("${folder}/with_pkg_config" "${checkpoint}" "${input}")
  run_or_fail("${pkg_config}" --cflags --libs fusedmoe_c)
  separate_arguments(flags UNIX_COMMAND "${output}")
  run_or_fail("${CC}" -std=c11 -Wall -Wextra -Wpedantic -Werror "${SOURCE}/examples/c/main.c" -o "${folder}/c_with_pkg_config"
    ${flags} "-Wl,-rpath,${prefix}/lib")
  expect_a_layer("${folder}/c_with_pkg_config" "${checkpoint}")
endif()
