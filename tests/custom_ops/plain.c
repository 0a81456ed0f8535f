/* An operator in C, without what the header has for C++. */
#include <popsim_custom_op.h>
#include <string.h>

#ifndef VERSION
#define VERSION POPSIM_CUSTOM_OP_VERSION
#endif
#ifndef NAME
#define NAME "Copied"
#endif
#ifndef ADDED
#define ADDED 0
#endif
#ifndef SHAPES
#define SHAPES shapes
#endif

static int shapes(popsim_call* call) {
  int64_t i;
  for (i = 0; i < call->num_inputs; ++i) {
    const popsim_tensor* input = &call->inputs[i];
    if (input->dtype != POPSIM_INT32 || input->rank != 1) {
      call->fail(call, "inputs have one axis, of int32");
      return 1;
    }
    call->declare(call, input->dtype, input->rank, input->shape);
  }
  return 0;
}

static int kernel(popsim_call* call) {
  int64_t i, k;
  if (call->num_attributes == 1) return 1; /* and does not say why */
  for (i = 0; i < call->num_inputs; ++i) {
    const int32_t* from = (const int32_t*)call->inputs[i].data;
    int32_t* to = (int32_t*)call->outputs[i].data;
    for (k = 0; k < call->inputs[i].shape[0]; ++k) to[k] = from[k] + ADDED;
  }
  return 0;
}

const popsim_custom_library* popsim_custom_ops(void);
const popsim_custom_library* popsim_custom_ops(void) {
  static popsim_custom_op op;
  static popsim_custom_library library;
  op.domain = "popsim_tests.c";
  op.name = NAME;
  op.version = 1;
  op.shapes = SHAPES;
  op.kernel = kernel;
  (void)shapes;
  library.version = VERSION;
  library.ops = &op;
  return &library;
}
