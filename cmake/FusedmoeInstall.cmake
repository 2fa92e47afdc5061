# What `cmake --install` leaves below the prefix: the library, its public headers, and what find_package(fusedmoe) and
# pkg-config read (docs/linking.md); the command and the module for MPI install themselves.
include(CMakePackageConfigHelpers)

set(package_dir lib/cmake/fusedmoe)
install(TARGETS fusedmoe EXPORT fusedmoe_cxx_targets ARCHIVE DESTINATION lib)
install(TARGETS fusedmoe_c EXPORT fusedmoe_c_targets LIBRARY DESTINATION lib)
install(DIRECTORY include/fusedmoe DESTINATION include)
install(EXPORT fusedmoe_cxx_targets FILE fusedmoeCxxTargets.cmake NAMESPACE fusedmoe:: DESTINATION ${package_dir})
install(EXPORT fusedmoe_c_targets FILE fusedmoeCTargets.cmake NAMESPACE fusedmoe:: DESTINATION ${package_dir})

configure_package_config_file(cmake/fusedmoeConfig.cmake.in "${PROJECT_BINARY_DIR}/generated/fusedmoeConfig.cmake"
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/generated/fusedmoeConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/generated/fusedmoeConfig.cmake"
  "${PROJECT_BINARY_DIR}/generated/fusedmoeConfigVersion.cmake" DESTINATION ${package_dir})

set(FMOE_CUDA_LINK "")
if(FMOE_CUDA_FOUND)
  set(FMOE_CUDA_LINK " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt")
endif()
configure_file(cmake/fusedmoe.pc.in "${PROJECT_BINARY_DIR}/generated/fusedmoe.pc" @ONLY)
configure_file(cmake/fusedmoe_c.pc.in "${PROJECT_BINARY_DIR}/generated/fusedmoe_c.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/generated/fusedmoe.pc" "${PROJECT_BINARY_DIR}/generated/fusedmoe_c.pc"
  DESTINATION lib/pkgconfig)
