// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

extern "C" float quantize(float value);

int main() { return quantize(1.5F) == 1.5F ? EXIT_SUCCESS : EXIT_FAILURE; }
