// SPDX-License-Identifier: Apache-2.0
//
// Every 64-bit Arm processor has NEON, so no target region opens.
#pragma once

#include <arm_neon.h>

#include "backends/begin.hpp"
