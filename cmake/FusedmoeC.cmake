# libfusedmoe_c.so: the C interface with all that stands below it, and nothing to see but fmoe_* (src/capi).
set(FUSEDMOE_C_SYMBOLS "${PROJECT_SOURCE_DIR}/cmake/fusedmoe_c.map")
add_library(fusedmoe_c SHARED $<TARGET_OBJECTS:fmoe_capi>)
add_library(fusedmoe::fusedmoe_c ALIAS fusedmoe_c)
target_link_libraries(fusedmoe_c PRIVATE fusedmoe ${FMOE_FMT})
target_link_options(fusedmoe_c PRIVATE "LINKER:--version-script=${FUSEDMOE_C_SYMBOLS}")
target_include_directories(fusedmoe_c INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
set_target_properties(fusedmoe_c PROPERTIES LINKER_LANGUAGE CXX LINK_DEPENDS "${FUSEDMOE_C_SYMBOLS}"
  LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}")
if(SKBUILD)  # a wheel: beside the package, one file
  install(TARGETS fusedmoe_c LIBRARY DESTINATION fusedmoe COMPONENT python)
else()
  set_target_properties(fusedmoe_c PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
endif()
