// A number of 64 bits for the bits of a tensor and their positions.
//
// It is the sum of bits(i) * key(i) over all positions i in row-major order,
// modulo 2^64. bits(i) are the 32 bits of value i in float32, or in int32, as a
// number from 0 to 2^32 - 1. Values in int64 have 32 bits more: those that
// differ from the sign extension of the lower ones (exclusive or) are added as
// if they were at position 2^40 + i. All of this is modulo 2^64:
//
//   key(i) = (mix(i % 256) | 1) ^ (mix(2^32 + i / 256) & ~1)
//   mix(x): z = (x + 1) * 0x9e3779b97f4a7c15
//           z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9
//           z = (z ^ (z >> 27)) * 0x94d049bb133111eb
//           z ^ (z >> 31)
//
// Keys are odd, so another value at one position always gives another number.
// A sum has no order: neither threads nor strides change it.
#pragma once

#include <cstdint>

#include "ops/observe/blocks.h"

namespace popsim::ops::observe {

[[nodiscard]] uint64_t fingerprint_of(const Block& block);

}  // namespace popsim::ops::observe
