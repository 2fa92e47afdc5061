# The module through which the library speaks to MPI: built where MPI is found, opened only under mpirun. Nothing else
# links to MPI, so that the same library and the same command run where it is not installed.

set(FMOE_MPI_FOUND OFF)
find_package(MPI QUIET COMPONENTS C)
if(MPI_C_FOUND)
  set(FMOE_MPI_FOUND ON)
  add_library(fusedmoe_mpi MODULE src/parallel/mpi/mpi_engine.c)
  set_target_properties(fusedmoe_mpi PROPERTIES C_STANDARD 11 C_VISIBILITY_PRESET hidden
    LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}")
  target_compile_options(fusedmoe_mpi PRIVATE -Wall -Wextra)
  target_link_libraries(fusedmoe_mpi PRIVATE MPI::MPI_C)
  install(TARGETS fusedmoe_mpi LIBRARY DESTINATION lib)
endif()
