/* An identity that takes a while: the time is random, and differs from call to call. */
#include <popsim_custom_op.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LONGEST 400000 /* nanoseconds */

static int shapes(popsim_call* call) {
  const popsim_tensor* input = &call->inputs[0];
  call->declare(call, input->dtype, input->rank, input->shape);
  return 0;
}

static int copy_late(popsim_call* call, const popsim_tensor* input) {
  static _Thread_local unsigned seed;
  struct timespec pause = {0, 0};
  int64_t i, size = 1;
  for (i = 0; i < input->rank; ++i) size *= input->shape[i];
  if (seed == 0) seed = (unsigned)time(NULL) ^ (unsigned)(size_t)&seed;
  pause.tv_nsec = rand_r(&seed) % LONGEST;
  if (rand_r(&seed) % 4 == 0) nanosleep(&pause, NULL);
  memcpy(call->outputs[0].data, input->data, (size_t)size * sizeof(float));
  return 0;
}

static int kernel(popsim_call* call) {
  return copy_late(call, &call->inputs[0]);
}

/* Its inputs: that of the operator, its output, and the gradient of this. */
static int gradient(popsim_call* call) {
  return copy_late(call, &call->inputs[2]);
}

const popsim_custom_library* popsim_custom_ops(void);
const popsim_custom_library* popsim_custom_ops(void) {
  static popsim_custom_op op;
  static popsim_custom_library library;
  op.domain = "popsim_tests.late";
  op.name = "Late";
  op.version = 1;
  op.shapes = shapes;
  op.kernel = kernel;
  op.gradient = gradient;
  library.version = POPSIM_CUSTOM_OP_VERSION;
  library.ops = &op;
  return &library;
}
