#pragma once

/// Version of the library and of the public headers. The build reads it from here; nothing else states it.
#define FUSEDMOE_VERSION_MAJOR 0
#define FUSEDMOE_VERSION_MINOR 1
#define FUSEDMOE_VERSION_PATCH 0
#define FUSEDMOE_VERSION_STRING "0.1.0"
