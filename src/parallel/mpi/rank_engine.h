/* What a transport offers to EngineCommunicator: messages between ranks, nothing more. Plain C, so that a
 * module which was built by another compiler can provide it. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FMOE_RANK_ENGINE_ABI 2

typedef struct fmoe_rank_engine {
  int32_t abi_version;
  int32_t rank;
  int32_t size;
  void* self;
  /* [size] the lowest rank on the same machine; null: all share one. Lives until close. */
  const int32_t* nodes;
  /* Begins to send or receive `rows` rows of `row_bytes`. Slots 0 .. 2 * size - 1 name what is under way.
   * Every function returns 0, or an error that describe() turns into text. */
  int (*send)(void* self, int32_t slot, const void* data, int64_t rows, int64_t row_bytes, int32_t peer,
              int32_t tag);
  int (*receive)(void* self, int32_t slot, void* data, int64_t rows, int64_t row_bytes, int32_t peer,
                 int32_t tag);
  /* Makes progress; *done becomes 1 when the message of the slot is complete. A receive whose message had
   * another length is an error. */
  int (*test)(void* self, int32_t slot, int32_t* done);
  void (*describe)(void* self, int error, char* text, int64_t capacity);
  /* Ends all ranks. Null or returning: it cannot. */
  void (*abort)(void* self, int exit_code);
  void (*close)(void* self);
} fmoe_rank_engine;

/* The entry of a module. Fills the engine; returns 0, or an error with its text in `text`. */
typedef int (*fmoe_rank_engine_open_function)(fmoe_rank_engine* engine, char* text, int64_t capacity);

#ifdef __cplusplus
}
#endif
