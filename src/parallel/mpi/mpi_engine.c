/* The module libfusedmoe_mpi.so: fmoe_rank_engine on MPI. Everything that decides (order, counts, deadlines,
 * errors) is in the library; this file only passes messages on, so that the library can be used where MPI is
 * not installed. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "rank_engine.h"

typedef struct {
  MPI_Comm comm;
  MPI_Request* requests; /* [2 * size] */
  int64_t* bytes;        /* expected by the receive of a slot; -1: a send */
  int32_t* nodes;        /* [size] */
  pid_t process;         /* that is the rank: one forked from it is none, and would wait for the others */
} State;

/* MPI starts once in a process and ends once: by the last engine, where the first one started it. */
static int open_engines, started_here;

/* Counts of MPI 3.1 are ints: as rows they reach 2^31 rows instead of 2 GiB. */
static int RowType(int64_t row_bytes, MPI_Datatype* type) {
  int error = MPI_Type_contiguous((int)row_bytes, MPI_BYTE, type);
  return error != MPI_SUCCESS ? error : MPI_Type_commit(type);
}

static int Send(void* self, int32_t slot, const void* data, int64_t rows, int64_t row_bytes, int32_t peer,
                int32_t tag) {
  State* state = self;
  MPI_Datatype type;
  if (rows > INT32_MAX || row_bytes > INT32_MAX) {
    return MPI_ERR_COUNT;
  }
  int error = RowType(row_bytes, &type);
  if (error != MPI_SUCCESS) {
    return error;
  }
  state->bytes[slot] = -1;
  error = MPI_Isend(data, (int)rows, type, peer, tag, state->comm, &state->requests[slot]);
  MPI_Type_free(&type);
  return error;
}

static int Receive(void* self, int32_t slot, void* data, int64_t rows, int64_t row_bytes, int32_t peer,
                   int32_t tag) {
  State* state = self;
  MPI_Datatype type;
  if (rows > INT32_MAX || row_bytes > INT32_MAX) {
    return MPI_ERR_COUNT;
  }
  int error = RowType(row_bytes, &type);
  if (error != MPI_SUCCESS) {
    return error;
  }
  state->bytes[slot] = rows * row_bytes;
  error = MPI_Irecv(data, (int)rows, type, peer, tag, state->comm, &state->requests[slot]);
  MPI_Type_free(&type);
  return error;
}

static int Test(void* self, int32_t slot, int32_t* done) {
  State* state = self;
  MPI_Status status;
  int flag = 0;
  const int error = MPI_Test(&state->requests[slot], &flag, &status);
  *done = flag;
  if (error == MPI_SUCCESS && flag && state->bytes[slot] >= 0) {
    MPI_Count received = 0;
    MPI_Get_elements_x(&status, MPI_BYTE, &received);
    if (received != state->bytes[slot]) {
      return MPI_ERR_TRUNCATE; /* a short message is no error to MPI */
    }
  }
  return error;
}

static void Describe(void* self, int error, char* text, int64_t capacity) {
  char message[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  (void)self;
  MPI_Error_string(error, message, &length);
  snprintf(text, (size_t)capacity, "%s", message);
}

static void Abort(void* self, int exit_code) {
  MPI_Abort(((State*)self)->comm, exit_code);
}

/* A program that ended MPI before its communicators has freed what they were. */
static void Close(void* self) {
  State* state = self;
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (state->process == getpid() && !finalized) {
    MPI_Comm_free(&state->comm);
    if (--open_engines == 0 && started_here) {
      MPI_Finalize();
    }
  }
  free(state->requests);
  free(state->bytes);
  free(state->nodes);
  free(state);
}

/* The lowest rank on the machine of each rank. */
static int FindNodes(State* state, int rank, int size) {
  MPI_Comm node;
  int32_t lowest = rank;
  state->nodes = malloc((size_t)size * sizeof(int32_t));
  if (state->nodes == NULL) {
    return MPI_ERR_NO_MEM;
  }
  int error = MPI_Comm_split_type(state->comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
  if (error != MPI_SUCCESS) {
    return error;
  }
  error = MPI_Bcast(&lowest, 1, MPI_INT32_T, 0, node);
  MPI_Comm_free(&node);
  return error != MPI_SUCCESS
             ? error
             : MPI_Allgather(&lowest, 1, MPI_INT32_T, state->nodes, 1, MPI_INT32_T, state->comm);
}

__attribute__((visibility("default"))) int fmoe_rank_engine_open(fmoe_rank_engine* engine, char* text,
                                                                 int64_t capacity) {
  int initialized = 0, finalized = 0, provided = 0, rank = 0, size = 0;
  MPI_Finalized(&finalized);
  if (finalized) {
    snprintf(text, (size_t)capacity,
             "MPI has ended in this process; it starts only once");
    return 1;
  }
  State* state = calloc(1, sizeof(State));
  snprintf(text, (size_t)capacity, "out of memory");
  if (state == NULL) {
    return 1;
  }
  state->process = getpid();
  MPI_Initialized(&initialized);
  if (!initialized) {
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS) {
      snprintf(text, (size_t)capacity, "MPI_Init_thread failed");
      free(state);
      return 1;
    }
    started_here = 1;
  }
  /* A communicator of our own: no message of the program around us is mistaken for ours, and errors come
   * back. */
  if (MPI_Comm_dup(MPI_COMM_WORLD, &state->comm) != MPI_SUCCESS) {
    snprintf(text, (size_t)capacity, "MPI_Comm_dup failed");
    free(state);
    return 1;
  }
  ++open_engines;
  MPI_Comm_set_errhandler(state->comm, MPI_ERRORS_RETURN);
  MPI_Comm_rank(state->comm, &rank);
  MPI_Comm_size(state->comm, &size);
  state->requests = malloc(2 * (size_t)size * sizeof(MPI_Request));
  state->bytes = malloc(2 * (size_t)size * sizeof(int64_t));
  if (state->requests == NULL || state->bytes == NULL) {
    Close(state);
    return 1;
  }
  if (FindNodes(state, rank, size) != MPI_SUCCESS) {
    snprintf(text, (size_t)capacity, "the ranks of one machine cannot be found");
    Close(state);
    return 1;
  }
  for (int slot = 0; slot < 2 * size; ++slot) {
    state->requests[slot] = MPI_REQUEST_NULL;
  }
  engine->abi_version = FMOE_RANK_ENGINE_ABI;
  engine->rank = rank;
  engine->size = size;
  engine->self = state;
  engine->nodes = state->nodes;
  engine->send = &Send;
  engine->receive = &Receive;
  engine->test = &Test;
  engine->describe = &Describe;
  engine->abort = &Abort;
  engine->close = &Close;
  return 0;
}
